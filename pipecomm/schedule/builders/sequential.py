"""Naive model parallelism: one microbatch at a time, so one rank at a time.

>>> print(build("sequential", 3, 2).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11
rank 0 F0  .  .  .  . B0 F1  .  .  .  . B1
rank 1  . F0  .  . B0  .  . F1  .  . B1  .
rank 2  .  . F0 B0  .  .  .  . F1 B1  .  .

The least memory of all, and P times the time of one rank's work.
"""

from __future__ import annotations

from pipecomm.schedule.builders.rows import Row, one_stage
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds one stage: no warmup at all."""
    return one_stage(rank, placement, num_microbatches, num_warmup=0)
