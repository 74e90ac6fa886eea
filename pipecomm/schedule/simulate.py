"""Predicts a step: its time, each rank's bubble, the communication that compute had to wait for."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Kind
from pipecomm.schedule.check import check_lists, walk_or_explain
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.walk import Event, Timing, Walk

__all__ = ["Costs", "Simulation", "simulate"]

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs, in seconds; each value is a number or one number per place.

    forward_s, backward_s: compute, per stage (`num_stages` values).
    forward_transfer_s, backward_transfer_s: how long one message keeps a link busy, per link
        (`num_stages - 1` values; link k joins stages k and k+1). The two directions of a link
        do not disturb each other; the messages of one direction between the same two ranks
        follow one another. Stages on one rank hand over in no time.
    latency_s: from leaving the link to arrival; several messages can be in it at once.
    overlap: False makes a rank stand still while it sends.
    slots: messages per direction that may travel before their receive is posted.
    backward_input_s, backward_weight_s: the two parts of a split backward, per stage; None is
        half of backward_s each.
    """

    forward_s: PerStage = 1.0
    backward_s: PerStage = 1.0
    forward_transfer_s: PerStage = 0.0
    backward_transfer_s: PerStage = 0.0
    latency_s: float = 0.0
    overlap: bool = True
    slots: int = 0
    backward_input_s: PerStage | None = None
    backward_weight_s: PerStage | None = None


@dataclass(frozen=True)
class Simulation:
    """A predicted step.

    step_s: first action to last. bubble: idle share of all ranks, with rank_bubbles per rank.
    exposed_comm_s: per rank, the part of its idle time spent on a transfer in progress.
    """

    step_s: float
    bubble: float
    rank_bubbles: tuple[float, ...]
    exposed_comm_s: tuple[float, ...]
    _walked: Walk = field(repr=False, compare=False)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """What happened when, by start time; made when first asked for."""
        return tuple(sorted(self._walked.events(), key=lambda event: (event.start_s, event.rank)))


def simulate(schedule: ScheduleData, costs: Costs) -> Simulation:
    """Walk the lists with `costs`. Raises ConfigError for lists or costs that cannot be."""
    check_lists(schedule)
    walked = walk_or_explain(schedule, _timing(costs, schedule.num_stages))
    step_s = max(walked.clock_s)
    busy = [seconds / step_s if step_s else 1.0 for seconds in walked.busy_s]
    return Simulation(
        step_s=step_s,
        bubble=1.0 - math.fsum(busy) / len(busy),
        rank_bubbles=tuple(1.0 - share for share in busy),
        exposed_comm_s=tuple(walked.exposed_comm_s),
        _walked=walked,
    )


def _timing(costs: Costs, num_stages: int) -> Timing:
    backward_s = _expand("backward_s", costs.backward_s, num_stages)
    half_s = [seconds / 2 for seconds in backward_s]

    def part_s(name: str, value: PerStage | None) -> Sequence[float]:
        return half_s if value is None else _expand(name, value, num_stages)

    if costs.slots < 0:
        raise ConfigError(f"expected slots of 0 or more; got {costs.slots}")
    _expand("latency_s", costs.latency_s, 1)
    return Timing(
        compute_s={
            Kind.F: _expand("forward_s", costs.forward_s, num_stages),
            Kind.B: backward_s,
            Kind.I: part_s("backward_input_s", costs.backward_input_s),
            Kind.W: part_s("backward_weight_s", costs.backward_weight_s),
        },
        transfer_s={
            "forward": _expand("forward_transfer_s", costs.forward_transfer_s, num_stages - 1),
            "backward": _expand("backward_transfer_s", costs.backward_transfer_s, num_stages - 1),
        },
        latency_s=costs.latency_s,
        slots=costs.slots,
        sends_block=not costs.overlap,
    )


def _expand(name: str, value: PerStage, count: int) -> Sequence[float]:
    values = [float(value)] * count if isinstance(value, int | float) else list(value)
    if len(values) != count:
        raise ConfigError(f"expected one number or {count} of them for {name}; got {len(values)}")
    bad = [number for number in values if not (math.isfinite(number) and number >= 0)]
    if bad:
        raise ConfigError(f"expected finite seconds of 0 or more for {name}; got {bad[0]}")
    return values
