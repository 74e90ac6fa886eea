"""Interleaved 1F1B (Narayanan et al., 2021): several stages per rank make the bubble smaller.

>>> print(build("interleaved", 4, 4, num_ranks=2).draw())
slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
rank 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
rank 1   . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .

Microbatches go in rounds: a rank takes a round through its first stage, then through its next,
and backwards through its last stage first. Rounds are equal and at least P microbatches long, as
in torch.distributed.pipelining; in the paper they are P long. The bubble is that of 1F1B over v,
the number of stages per rank, and so many times more messages are sent.
"""

from __future__ import annotations

import numpy as np

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, alternating
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import action_array

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds v stages, with a warmup of (v-1) rounds and 2(P-1-k) more.

    With v = 1 any number of microbatches has a form: rounds make no difference.
    """
    stages = placement.stages_of(rank)
    round_size = _round_size(num_microbatches, placement.num_ranks, len(stages))
    return alternating(
        _in_rounds(Kind.F, stages, num_microbatches, round_size),
        _in_rounds(Kind.B, stages[::-1], num_microbatches, round_size),
        num_warmup=(len(stages) - 1) * round_size + 2 * (placement.num_ranks - 1 - rank),
    )


def _in_rounds(kind: Kind, stages: tuple[int, ...], num_microbatches: int, round_size: int) -> Row:
    # With one stage the last round may be shorter.
    rounds = np.split(np.arange(num_microbatches), range(round_size, num_microbatches, round_size))
    return np.concatenate(
        [action_array(kind, stage, numbers) for numbers in rounds for stage in stages]
    )


def _round_size(num_microbatches: int, num_ranks: int, stages_per_rank: int) -> int:
    num_rounds = max(1, num_microbatches // num_ranks)
    if stages_per_rank > 1 and num_microbatches % num_rounds:
        below = num_microbatches - num_microbatches % num_ranks
        raise ConfigError(
            f"expected microbatches in equal rounds of at least as many as ranks; got "
            f"{num_microbatches} on {num_ranks} ranks; {below} and {below + num_ranks} are possible"
        )
    return num_microbatches // num_rounds
