"""GPipe (Huang et al., 2019): all forwards, then all backwards.

>>> print(build("gpipe", 3, 4).draw())
slot    0  1  2  3  4  5  6  7  8  9 10 11
rank 0 F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
rank 1  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
rank 2  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
"""

from __future__ import annotations

import numpy as np

from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, of_each
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds one stage."""
    (stage,) = placement.stages_of(rank)
    return np.concatenate([of_each(kind, stage, num_microbatches) for kind in (Kind.F, Kind.B)])
