"""PipeDream (Narayanan et al., 2019): 1F1B without a flush, an update after every microbatch.

>>> print(build("pipedream", 3, 4).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
rank 0 F0 F1 F2  .  . B0 U0 F3 B1 U1  . B2 U2  . B3 U3
rank 1  . F0 F1  . B0 U0 F2 B1 U1 F3 B2 U2  . B3 U3  .
rank 2  .  . F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3  .  .

A forward takes the newest weights of its stage, its backward the same ones: stage k keeps up to
P-k versions, and its gradients come P-1-k updates late. The drawing is of one drained run.
"""

from __future__ import annotations

from pipecomm.schedule.builders import one_f_one_b
from pipecomm.schedule.builders.rows import Row, with_updates
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds one stage."""
    return with_updates(one_f_one_b.row(rank, placement, num_microbatches), every=1)
