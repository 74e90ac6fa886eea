"""The order of an evaluation: forwards of any number of microbatches, over any placement.

A rank takes as many microbatches as there are ranks through its first stage, then through its
next. What comes back from other ranks is there in time, and holds up a rank that is ahead.
"""

from __future__ import annotations

import numpy as np

from pipecomm.schedule.action import Kind
from pipecomm.schedule.data import require_count
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import Ranks, action_array
from pipecomm.schedule.schedule import Schedule

__all__ = ["forward_rounds"]


def forward_rounds(placement: Placement, num_microbatches: int) -> Schedule:
    """The schedule. Raises ConfigError for a number of microbatches below 1."""
    require_count("num_microbatches", num_microbatches)
    rounds = [
        range(first, min(first + placement.num_ranks, num_microbatches))
        for first in range(0, num_microbatches, placement.num_ranks)
    ]
    rows = [
        np.concatenate(
            [
                action_array(Kind.F, stage, numbers)
                for numbers in rounds
                for stage in placement.stages_of(rank)
            ]
        )
        for rank in range(placement.num_ranks)
    ]
    return Schedule("evaluation", placement.num_stages, num_microbatches, Ranks.of(rows))
