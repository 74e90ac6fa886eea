"""Builds a schedule by its name: how its stages are placed, and the list of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipecomm.errors import ConfigError
from pipecomm.schedule.builders import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    paci,
    pipedream,
    pipedream_2bw,
    planned,
    sequential,
    zb_h1,
    zb_v,
)
from pipecomm.schedule.builders.rows import Row
from pipecomm.schedule.data import Weights, require_count
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import Ranks
from pipecomm.schedule.schedule import Schedule

__all__ = ["build", "known_schedules"]

# Lists of more do not fit into the memory of most machines: some 10 GB, walked.
_MAX_SIZE = 100_000_000


class _Named(NamedTuple):
    # (num_stages, num_ranks); raises ConfigError for sizes that the schedule has no form for.
    place: Callable[[int, int], Placement]
    # (placement, num_microbatches, **options); raises ConfigError likewise.
    rows: Callable[..., Sequence[Row]]
    weights: Weights = Weights.ONE
    # What `rows` takes besides.
    options: tuple[str, ...] = ()
    # Where the number of ranks is not given.
    stages_per_rank: int = 1


def _each(row: Callable[..., Row]) -> Callable[..., Sequence[Row]]:
    """The lists of all ranks by a function that gives one."""

    def rows(placement: Placement, num_microbatches: int, **options: Any) -> Sequence[Row]:
        ranks = range(placement.num_ranks)
        return [row(rank, placement, num_microbatches, **options) for rank in ranks]

    return rows


_LINEAR, _LOOPED, _V_SHAPED = Placement.linear, Placement.looped, Placement.v_shaped
_EVERY = ("update_every",)
_SCHEDULES = {
    "sequential": _Named(_LINEAR, _each(sequential.row)),
    "gpipe": _Named(_LINEAR, _each(gpipe.row)),
    "1f1b": _Named(_LINEAR, _each(one_f_one_b.row)),
    "eager-1f1b": _Named(_LINEAR, _each(eager_one_f_one_b.row)),
    "interleaved": _Named(_LOOPED, _each(interleaved.row)),
    "looped-bfs": _Named(_LOOPED, _each(looped_bfs.row)),
    "zb-h1": _Named(_LINEAR, _each(zb_h1.row)),
    "zb-v": _Named(_V_SHAPED, _each(zb_v.row), stages_per_rank=2),
    "dualpipe-v": _Named(_V_SHAPED, _each(dualpipe_v.row), stages_per_rank=2),
    "planned": _Named(_LINEAR, planned.rows, options=("costs", "max_activations")),
    "pipedream": _Named(_LINEAR, _each(pipedream.row), Weights.STASHED),
    "pipedream-2bw": _Named(_LINEAR, _each(pipedream_2bw.row), Weights.DOUBLE, _EVERY),
    "paci": _Named(_LINEAR, _each(paci.row), Weights.NEWEST, _EVERY),
}


def known_schedules(*, asynchronous: bool | None = None) -> tuple[str, ...]:
    """The names `build` knows; only those with updates in their lists, or only the others."""
    return tuple(
        name
        for name, named in _SCHEDULES.items()
        if asynchronous is None or asynchronous == (named.weights is not Weights.ONE)
    )


def _require_buildable(name: str, num_stages: int, num_microbatches: int) -> None:
    if num_stages * num_microbatches > _MAX_SIZE:
        raise ConfigError(
            f"{name}: expected at most {_MAX_SIZE:,} stages times microbatches; got "
            f"{num_stages:,} times {num_microbatches:,}"
        )


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None = None,
    **options: Any,
) -> Schedule:
    """The schedule called `name` (in any case) of `num_stages` on `num_ranks`.

    num_ranks: None is as many as stages, or half as many for a schedule in a V. Options are
    `update_every` (pipedream-2bw, paci: microbatches between updates; default: the ranks) and
    `costs` and `max_activations` (planned; see there).

    Raises ConfigError for an unknown name or option, a count below 1, and sizes that the schedule
    has no form for, saying which exist.
    """
    named = _SCHEDULES.get(name.lower()) if isinstance(name, str) else None
    if named is None:
        known = ", ".join(_SCHEDULES)
        raise ConfigError(f"expected one of the schedules {known}; got {name!r}")
    require_count("num_stages", num_stages)
    require_count("num_microbatches", num_microbatches)
    if num_ranks is None:
        num_ranks = max(1, num_stages // named.stages_per_rank)
    require_count("num_ranks", num_ranks)
    _require_buildable(name.lower(), num_stages, num_microbatches)
    unknown = [option for option in options if option not in named.options]
    if unknown:
        takes = ", ".join(named.options) or "none"
        raise ConfigError(f"{name.lower()}: expected options: {takes}; got {', '.join(unknown)}")
    given = {option: options.get(option) for option in named.options}
    try:
        placement = named.place(num_stages, num_ranks)
        rows = named.rows(placement, num_microbatches, **given)
    except ConfigError as error:
        raise ConfigError(f"{name.lower()}: {error}") from None
    return Schedule(name.lower(), num_stages, num_microbatches, Ranks.of(rows), named.weights)
