"""Local accumulation without a stash, after PACI (2026): 1F1B without a flush, one version.

>>> print(build("paci", 3, 6).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
rank 0 F0 F1 F2  .  . B0 F3 B1 F4 B2 U2 F5 B3  . B4  . B5 U5
rank 1  . F0 F1  . B0 F2 B1 F3 B2 U2 F4 B3 F5 B4  . B5 U5  .
rank 2  .  . F0 B0 F1 B1 F2 B2 U2 F3 B3 F4 B4 F5 B5 U5  .  .

An update after every `update_every` microbatches; forward and backward take the newest weights
each, so a microbatch's backward can meet weights that its forward did not: at most
ceil((P-1-k) / update_every) updates lie between them on stage k.
"""

from __future__ import annotations

from pipecomm.schedule.builders import one_f_one_b
from pipecomm.schedule.builders.rows import Row, check_batches, with_updates
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int, update_every: int | None) -> Row:
    """The list of a rank that holds one stage. `update_every` None: as many as there are ranks."""
    every = placement.num_ranks if update_every is None else update_every
    check_batches(num_microbatches, every)
    return with_updates(one_f_one_b.row(rank, placement, num_microbatches), every)
