"""Predicts a step: its time, each rank's bubble, the communication that compute had to wait for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipecomm.schedule.action import KINDS
from pipecomm.schedule.check import check_lists, walk_or_explain
from pipecomm.schedule.costs import Costs, expand, timing_of
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.memory import peak_per_rank
from pipecomm.schedule.versions import version_use
from pipecomm.schedule.walk import Event, Progress, Walk

__all__ = ["Simulation", "simulate"]

_ENDS_BACKWARD = np.array([kind.change_in_live < 0 for kind in KINDS])


@dataclass(frozen=True)
class Simulation:
    """A predicted step.

    step_s: first action to last, data-parallel reductions included. bubble: idle share of all
    ranks, with rank_bubbles per rank. exposed_comm_s: per rank, the part of its idle time spent on
    a transfer in progress. exposed_reduce_s: what the reductions add after the last action.
    peak_nbytes: per rank, its weights, in as many versions as are kept, and the most that its
    activations take; tensors on their way are not counted. num_messages: between ranks.
    """

    step_s: float
    bubble: float
    rank_bubbles: tuple[float, ...]
    exposed_comm_s: tuple[float, ...]
    exposed_reduce_s: float
    peak_nbytes: tuple[float, ...]
    num_messages: int
    _walked: Walk = field(repr=False, compare=False)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """What happened when, by start time; made when first asked for."""
        return tuple(sorted(self._walked.events(), key=lambda event: (event.start_s, event.rank)))


def simulate(schedule: ScheduleData, costs: Costs, progress: Progress | None = None) -> Simulation:
    """Walk the lists with `costs`. Raises ConfigError for lists or costs that cannot be.

    `progress` is called now and then with the share that is done.
    """
    check_lists(schedule)
    walked = walk_or_explain(schedule, timing_of(costs, schedule.num_stages), progress)
    last_s = float(walked.clock_s.max())
    step_s = max(last_s, _reductions_end_s(schedule, costs, walked))
    busy = (walked.busy_s / step_s).tolist() if step_s else [1.0] * len(walked.busy_s)
    return Simulation(
        step_s=step_s,
        bubble=1.0 - math.fsum(busy) / len(busy),
        rank_bubbles=tuple(1.0 - share for share in busy),
        exposed_comm_s=tuple(walked.exposed_comm_s.tolist()),
        exposed_reduce_s=step_s - last_s,
        peak_nbytes=_peak_nbytes(schedule, costs),
        num_messages=walked.num_messages,
        _walked=walked,
    )


def _reductions_end_s(schedule: ScheduleData, costs: Costs, walked: Walk) -> float:
    seconds = expand("reduce_s", costs.reduce_s, schedule.num_stages)
    if not seconds.any():
        return 0.0
    ends = _ENDS_BACKWARD[schedule.ranks.column("kind")]
    ready_s = np.zeros(schedule.num_stages)
    np.maximum.at(ready_s, schedule.ranks.column("stage")[ends], walked.end_s[ends])
    free_s = np.zeros(len(schedule.ranks))
    for stage in np.argsort(ready_s, kind="stable"):
        rank = schedule.placement.rank_of[stage]
        free_s[rank] = max(free_s[rank], ready_s[stage]) + seconds[stage]
    return float(free_s.max())


def _peak_nbytes(schedule: ScheduleData, costs: Costs) -> tuple[float, ...]:
    activation, weights = (
        expand(name, getattr(costs, name), schedule.num_stages)
        for name in ("activation_nbytes", "weights_nbytes")
    )
    held: npt.NDArray[np.float64] = activation
    if costs.held_for_weights_nbytes is not None:
        name = "held_for_weights_nbytes"
        held = expand(name, costs.held_for_weights_nbytes, schedule.num_stages)
    peaks = np.array(peak_per_rank(schedule, activation.tolist(), held.tolist()))
    versions = np.array([use.live for use in version_use(schedule)]) if weights.any() else 1
    np.add.at(peaks, list(schedule.placement.rank_of), weights * versions)
    return tuple(peaks.tolist())
