"""schedule="auto": the fastest schedule for what the first steps took, and whether it still is."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from pipecomm.engine.measured import costs_of, own_times
from pipecomm.engine.result import StepResult
from pipecomm.engine.stats import StepStats
from pipecomm.errors import ConfigError
from pipecomm.schedule import Candidate, Costs, Schedule, best, build, known_schedules
from pipecomm.schedule.memory import peak_per_rank

__all__ = ["ScheduleChoice"]

# The first step allocates and connects what later ones find.
_FIRST_CHOICE_AT = 3
# A schedule is kept while its steps take what it was chosen for, within this share.
_TOLERANCE = 0.1
_STEPS_BETWEEN_LOOKS = 100
# One that never keeps its word is chosen so often in a row.
_MAX_CHOICES_IN_A_ROW = 3

_log = logging.getLogger("pipecomm")


class ScheduleChoice:
    """Of one rank; all make the same choice, at the same training steps.

    Considered are the named schedules with one update a step, the first one's placement, and no
    more activations than it keeps on its fullest rank.
    """

    def __init__(self, first: Schedule) -> None:
        self._current = first
        self._limit = _peak(first)
        self._expected_s: float | None = None
        self._next_look = _FIRST_CHOICE_AT
        self._num_choices = 0
        self._last: StepResult | None = None

    def note(self, result: StepResult) -> None:
        """A training step has succeeded on this rank."""
        self._last = result

    def is_due(self, iteration: int) -> bool:
        """Whether all ranks choose() before this training step, counted from 1."""
        return iteration >= self._next_look

    def choose(self, iteration: int, gather: Callable[[Tensor], list[Tensor]]) -> Schedule | None:
        """The schedule from this step on; None: the one that is run.

        `gather` gives every rank's tensor, by rank. Without a successful step on every rank the
        choice is put off by one.
        """
        last, self._last = self._last, None
        placement = self._current.placement
        stats = StepStats(math.nan) if last is None else last.stats
        step_s = torch.tensor([stats.step_s], dtype=torch.float64)
        rows = gather(torch.cat([step_s, own_times(stats, placement).flatten()]))
        step_s_of = [float(row[0]) for row in rows]
        if any(map(math.isnan, step_s_of)):
            self._next_look = iteration + 1
            return None
        if self._is_as_expected(max(step_s_of)):
            self._num_choices = 0
            self._next_look = iteration + _STEPS_BETWEEN_LOOKS
            return None
        shape = (-1, placement.num_stages)
        chosen = self._fastest(costs_of([row[1:].view(shape) for row in rows]))
        return self._adopt(chosen, iteration, gather)

    def _is_as_expected(self, step_s: float) -> bool:
        if self._expected_s is None:
            return False
        return abs(step_s - self._expected_s) <= _TOLERANCE * self._expected_s

    def _fastest(self, costs: Costs) -> Candidate:
        count, placement = self._current.num_microbatches, self._current.placement
        found = []
        for name in known_schedules(asynchronous=False):
            options = {"costs": costs} if name == "planned" else {}
            try:
                schedule = build(name, placement.num_stages, count, placement.num_ranks, **options)
            except ConfigError:
                continue
            if schedule.placement == placement:
                simulation = schedule.simulate(costs)
                peak = _peak(schedule)
                found.append(Candidate(name, placement.num_stages, schedule, simulation, peak, ""))
        chosen = best(found, self._limit, in_bytes=False)
        # The first one is among them.
        assert chosen is not None
        return chosen

    def _adopt(
        self, chosen: Candidate, iteration: int, gather: Callable[[Tensor], list[Tensor]]
    ) -> Schedule | None:
        assert chosen.schedule is not None
        assert chosen.simulation is not None
        # Machines that round differently may plan differently, and would wait for each other.
        own = torch.tensor([_checksum(chosen.schedule)], dtype=torch.int64)
        if any(int(other) != int(own) for other in gather(own)):
            _log.warning("the ranks choose different schedules; %s is kept", self._current.name)
            self._next_look = iteration + _STEPS_BETWEEN_LOOKS
            return None
        self._expected_s = chosen.simulation.step_s
        # The first step of a schedule is not measured either.
        self._next_look = iteration + 2
        self._num_choices += 1
        if self._num_choices == _MAX_CHOICES_IN_A_ROW:
            self._num_choices = 0
            self._next_look = iteration + _STEPS_BETWEEN_LOOKS
        if chosen.schedule == self._current:
            return None
        _log.info(
            "schedule %s instead of %s: %.4g ms a step by what was measured",
            chosen.name,
            self._current.name,
            self._expected_s * 1e3,
        )
        self._current = chosen.schedule
        return chosen.schedule


def _peak(schedule: Schedule) -> float:
    share = [1.0] * schedule.num_stages
    return max(peak_per_rank(schedule, share, share))


def _checksum(schedule: Schedule) -> int:
    value = 0
    for row in schedule.ranks:
        value = zlib.crc32(row.array.tobytes(), value)
    return value
