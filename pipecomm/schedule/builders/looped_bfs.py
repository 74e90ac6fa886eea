"""Looped breadth-first pipeline (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023).

>>> print(build("looped-bfs", 4, 4, num_ranks=2).draw())
slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
rank 0 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3   .   . 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0
rank 1   . 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0   .

All microbatches go through a rank's first stage, then all through its next, and back in the
opposite order. With M >= P the bubble is that of GPipe over v, the number of stages per rank; all
microbatches are kept, as in GPipe. Each stage's gradients are ready early, one stage after the
other, for a data-parallel reduction that overlaps with the rest.
"""

from __future__ import annotations

import numpy as np

from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, of_each
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds v stages."""
    stages = placement.stages_of(rank)
    forwards = [of_each(Kind.F, stage, num_microbatches) for stage in stages]
    backwards = [of_each(Kind.B, stage, num_microbatches)[::-1] for stage in reversed(stages)]
    return np.concatenate([*forwards, *backwards])
