"""Builds a schedule by its name: how its stages are placed, and the list of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipecomm.errors import ConfigError
from pipecomm.schedule.builders import eager_one_f_one_b, gpipe, interleaved, one_f_one_b
from pipecomm.schedule.builders.rows import Row
from pipecomm.schedule.data import require_count
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.schedule import Schedule

__all__ = ["build", "known_schedules"]


class _Named(NamedTuple):
    # (num_stages, num_ranks); raises ConfigError for sizes that the schedule has no form for.
    place: Callable[[int, int], Placement]
    # (rank, placement, num_microbatches); raises ConfigError likewise.
    row: Callable[[int, Placement, int], Row]


_SCHEDULES = {
    "gpipe": _Named(Placement.linear, gpipe.row),
    "1f1b": _Named(Placement.linear, one_f_one_b.row),
    "eager-1f1b": _Named(Placement.linear, eager_one_f_one_b.row),
    "interleaved": _Named(Placement.looped, interleaved.row),
}


def known_schedules() -> tuple[str, ...]:
    """The names `build` knows."""
    return tuple(_SCHEDULES)


def build(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> Schedule:
    """The schedule called `name` (in any case) of `num_stages` on `num_ranks`; None: as many.

    Raises ConfigError for an unknown name, a count below 1, and sizes that the schedule has no
    form for.
    """
    named = _SCHEDULES.get(name.lower()) if isinstance(name, str) else None
    if named is None:
        known = ", ".join(_SCHEDULES)
        raise ConfigError(f"expected one of the schedules {known}; got {name!r}")
    num_ranks = num_stages if num_ranks is None else num_ranks
    require_count("num_stages", num_stages)
    require_count("num_microbatches", num_microbatches)
    require_count("num_ranks", num_ranks)
    try:
        placement = named.place(num_stages, num_ranks)
        rows = [named.row(rank, placement, num_microbatches) for rank in range(num_ranks)]
    except ConfigError as error:
        raise ConfigError(f"{name.lower()}: {error}") from None
    return Schedule(name.lower(), num_stages, num_microbatches, tuple(map(tuple, rows)))
