"""Hands the lists of a schedule, what kinds mean and who is next to whom to the compiled core."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipecomm._native import core
from pipecomm.schedule.action import KINDS, RECEIVES, SENDS, Direction, Kind
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import Ranks

__all__ = ["COMPUTE_KINDS", "DIRECTIONS", "core_lists"]

# The core's numbers 0 and 1.
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
COMPUTE_KINDS = tuple(kind for kind in KINDS if kind.is_compute)
_ROLES = {"compute": 0, "send": 1, "receive": 2}


def core_lists(ranks: Ranks, placement: Placement | None) -> core.ScheduleLists:
    """What the core's functions of schedules are methods of. Without a placement: find_fault.

    Raises NotBuiltError where pipecomm is not built.
    """
    return core.ScheduleLists(
        ranks.actions, ranks.offsets, _KIND_TABLE, _MESSAGE_TABLE, _way_table(placement)
    )


def _kind_row(kind: Kind) -> list[int]:
    role = "compute" if kind.is_compute else "send" if kind.is_send else "receive"
    direction = -1 if kind.direction is None else DIRECTIONS.index(kind.direction)
    rivals = [
        other
        for other in COMPUTE_KINDS
        if kind.is_compute
        and kind.direction is not None
        and other is not kind
        and other.direction == kind.direction
    ]
    return [_ROLES[role], direction, _bits(kind.after), _bits(rivals)]


def _bits(kinds: tuple[Kind, ...] | list[Kind]) -> int:
    return sum(1 << kind.index for kind in kinds)


def _way_table(placement: Placement | None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Rows: the rank of each stage; by direction whose result it takes; who takes its own."""
    if placement is None:
        return np.empty((5, 0), np.int32)
    table = np.full((5, placement.num_stages), -1, np.int32)
    table[0] = placement.rank_of
    for hop in placement.hops:
        direction = DIRECTIONS.index(hop.direction)
        table[1 + direction, hop.target] = hop.source
        table[3 + direction, hop.source] = hop.target
    return table


_KIND_TABLE = np.array([_kind_row(kind) for kind in KINDS], np.int32)
_MESSAGE_TABLE = np.array(
    [[SENDS[direction].index, RECEIVES[direction].index] for direction in DIRECTIONS], np.int32
)
