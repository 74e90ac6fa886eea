"""The schedules known by name, each from its formula."""

from __future__ import annotations

from collections.abc import Callable

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Kind
from pipecomm.schedule.schedule import Schedule, require_count

__all__ = ["build", "known_schedules"]

_Row = tuple[Action, ...]


def _gpipe(stage: int, num_stages: int, num_microbatches: int) -> _Row:
    """All forwards, then all backwards."""
    every = range(num_microbatches)
    return (*(_forward(stage, m) for m in every), *(_backward(stage, m) for m in every))


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> _Row:
    """Warmup of P-1-k forwards: the fewest activations, but a backward that comes late stalls k.

    PipeDream (Narayanan et al., 2019), with a flush at the end of the step.
    """
    return _alternating(stage, num_stages - 1 - stage, num_microbatches)


def _eager_one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> _Row:
    """Warmup of 2(P-1-k) forwards: work to do while a transfer of up to (tF+tB)/2 is under way.

    Eager-1F1B (Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023).
    """
    return _alternating(stage, 2 * (num_stages - 1 - stage), num_microbatches)


def _alternating(stage: int, num_warmup: int, num_microbatches: int) -> _Row:
    """Warmup forwards, then one forward and one backward in turn, then the cooldown backwards."""
    num_warmup = min(num_warmup, num_microbatches)
    num_steady = num_microbatches - num_warmup
    warmup = [_forward(stage, m) for m in range(num_warmup)]
    steady = [
        action
        for m in range(num_steady)
        for action in (_forward(stage, num_warmup + m), _backward(stage, m))
    ]
    cooldown = [_backward(stage, m) for m in range(num_steady, num_microbatches)]
    return (*warmup, *steady, *cooldown)


_BUILDERS: dict[str, Callable[[int, int, int], _Row]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "eager-1f1b": _eager_one_forward_one_backward,
}


def known_schedules() -> tuple[str, ...]:
    """The names `build` knows."""
    return tuple(_BUILDERS)


def build(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called `name` (in any case) with one stage per rank.

    Raises ConfigError for an unknown name or a count below 1.
    """
    row = _BUILDERS.get(name.lower()) if isinstance(name, str) else None
    if row is None:
        known = ", ".join(_BUILDERS)
        raise ConfigError(f"expected one of the schedules {known}; got {name!r}")
    require_count("num_stages", num_stages)
    require_count("num_microbatches", num_microbatches)
    ranks = tuple(row(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule(name.lower(), num_stages, num_microbatches, ranks)


def _forward(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


def _backward(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, stage, microbatch)
