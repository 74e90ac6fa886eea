"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023): weight gradients fill the bubble.

>>> print(build("zb-h1", 3, 6).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
rank 0 F0 F1 F2  .  . I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
rank 1  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
rank 2  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5

1F1B with split backwards: rank k computes the weight gradients k microbatches late, so that input
gradients come up sooner. With F, I and W seconds each the bubble is (P-1)(F+I-W), a third of
1F1B's where they are equal, and every rank keeps what 1F1B's first one does: P microbatches.
"""

from __future__ import annotations

import numpy as np

from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, alternating, of_each
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds one stage: 1F1B's, and W k microbatches behind I on rank k."""
    (stage,) = placement.stages_of(rank)
    whole = alternating(
        of_each(Kind.F, stage, num_microbatches),
        of_each(Kind.I, stage, num_microbatches),
        num_warmup=placement.num_ranks - 1 - rank,
    )
    weights = of_each(Kind.W, stage, num_microbatches)
    num_late = min(rank, num_microbatches)
    places = np.flatnonzero(whole[:, 0] == Kind.I.index)[num_late:] + 1
    in_turn = np.insert(whole, places, weights[: num_microbatches - num_late], axis=0)
    return np.concatenate([in_turn, weights[num_microbatches - num_late :]])
