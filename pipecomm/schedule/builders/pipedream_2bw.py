"""PipeDream-2BW (Narayanan et al., 2021): 1F1B without a flush, two versions of the weights.

>>> print(build("pipedream-2bw", 3, 6).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
rank 0 F0 F1 F2  .  . B0 F3 B1 F4 B2 U2 F5 B3  . B4  . B5 U5
rank 1  . F0 F1  . B0 F2 B1 F3 B2 U2 F4 B3 F5 B4  . B5 U5  .
rank 2  .  . F0 B0 F1 B1 F2 B2 U2 F3 B3 F4 B4 F5 B5 U5  .  .

An update after every batch of `update_every` microbatches, P or more. All microbatches of batch t
use the version from before the update of batch t-1, on every stage: W(t+1) = W(t) - lr g(W(t-1)).
"""

from __future__ import annotations

from pipecomm.errors import ConfigError
from pipecomm.schedule.builders import one_f_one_b
from pipecomm.schedule.builders.rows import Row, check_batches, with_updates
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int, update_every: int | None) -> Row:
    """The list of a rank that holds one stage. `update_every` None: as many as there are ranks."""
    every = placement.num_ranks if update_every is None else update_every
    if every < placement.num_ranks:
        raise ConfigError(
            f"expected updates after at least as many microbatches as ranks, "
            f"{placement.num_ranks}, or a third version would be needed; got {every}"
        )
    check_batches(num_microbatches, every)
    return with_updates(one_f_one_b.row(rank, placement, num_microbatches), every)
