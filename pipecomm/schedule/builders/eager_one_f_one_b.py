"""Eager-1F1B (Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023).

>>> print(build("eager-1f1b", 3, 5).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13
rank 0 F0 F1 F2 F3 F4 B0  . B1  . B2  . B3  . B4
rank 1  . F0 F1 F2 B0 F3 B1 F4 B2  . B3  . B4  .
rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  .  .

Twice 1F1B's warmup: work to do while a transfer of up to (tF+tB)/2 is under way.
"""

from __future__ import annotations

from pipecomm.schedule.builders.rows import Row, one_stage
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds one stage: a warmup of 2(P-1-k) forwards on rank k."""
    num_warmup = 2 * (placement.num_ranks - 1 - rank)
    return one_stage(rank, placement, num_microbatches, num_warmup)
