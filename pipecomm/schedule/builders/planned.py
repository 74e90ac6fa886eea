"""A greedy list schedule from measured costs, as CrossPipe (2025) makes for slow links.

>>> print(build("planned", 3, 5, costs=(costs := Costs(1, 2, latency_s=1))).draw(costs))
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24
rank 0 F0 F1 F2  .  .  .  .  .  . I0 W0 I1 F3 W1 F4 I2 W2  .  .  .  . I3 W3 I4 W4
rank 1  .  . F0 F1  .  .  . I0 F2 I1 W0 W1  . I2 F3 W2 F4  .  . I3 W3 I4 W4  .  .
rank 2  .  .  .  . F0 I0 F1 I1 W0 W1 F2 I2 W2  .  .  . F3 I3 F4 I4 W3 W4  .  .  .

Each rank does, whenever it is free, the first of these that is possible at that moment: the next
backward, the next forward if its activations still fit, a weight gradient. Planned by several
rules: with whole backwards or split ones; with or without waiting for a message on its way before
a weight gradient would end; with weight gradients up to k behind on rank k only, as in ZB-H1; with
no more forwards ahead than 1F1B has, or as many as fit. The order that simulates fastest is taken;
the orders of 1F1B and ZB-H1, where they fit, are tried too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders import one_f_one_b, zb_h1
from pipecomm.schedule.builders.rows import Row
from pipecomm.schedule.core_lists import DIRECTIONS
from pipecomm.schedule.costs import Costs, timing_of
from pipecomm.schedule.data import ScheduleData, require_count
from pipecomm.schedule.memory import peak_activations
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import Ranks
from pipecomm.schedule.simulate import simulate
from pipecomm.schedule.walk import Timing

__all__ = ["rows"]


def rows(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None,
    max_activations: int | Sequence[int] | None,
) -> Sequence[Row]:
    """The lists of ranks that hold one stage each.

    costs: None is F and B of one second. max_activations: the most microbatches that a rank may
    keep, from F to the end of the backward, one number or one per rank; None: as many as ranks,
    which is what the first rank keeps with 1F1B.
    """
    costs = costs or Costs()
    timing = timing_of(costs, placement.num_stages)
    limits = _limits(max_activations, placement.num_ranks)
    plans = [
        Ranks.of(_Planner(placement, num_microbatches, timing, limits, rule).rows())
        for rule in _RULES
    ]
    plans += [
        plan
        for plan in (
            Ranks.of(named.row(rank, placement, num_microbatches) for rank in range(len(limits)))
            for named in (one_f_one_b, zb_h1)
        )
        if _keeps_to(plan, limits)
    ]
    size = (placement.num_stages, num_microbatches)
    best = min(plans, key=lambda plan: simulate(ScheduleData("plan", *size, plan), costs).step_s)
    return [row.array for row in best]


def _keeps_to(plan: Ranks, limits: Sequence[int]) -> bool:
    data = ScheduleData.from_lists("plan", plan)
    peaks = peak_activations(data)
    return all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def _limits(value: int | Sequence[int] | None, num_ranks: int) -> list[int]:
    given = num_ranks if value is None else value
    limits = [given] * num_ranks if isinstance(given, int) else list(given)
    if len(limits) != num_ranks:
        raise ConfigError(
            f"expected one number or {num_ranks} of them for max_activations; got {len(limits)}"
        )
    for limit in limits:
        require_count("max_activations", limit)
    return limits


class _Rule(NamedTuple):
    parts: tuple[Kind, ...]
    # A weight gradient waits if a message arrives within this share of its time.
    patience: float = 0.0
    # Weight gradients more than the rank's number behind come before forwards.
    stays_close: bool = False
    # Forwards ahead of backwards, more than 1F1B's; None: as many as fit.
    num_extra: int | None = None


_SPLIT = (Kind.I, Kind.W)
_RULES = (
    _Rule((Kind.B,)),
    *(
        _Rule(_SPLIT, patience, stays_close, num_extra)
        for patience in (0.0, 0.99)
        for stays_close in (False, True)
        for num_extra in (0, 1, None)
    ),
)


class _Planner:
    """Runs the ranks against a clock and notes what each one does."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        timing: Timing,
        limits: list[int],
        rule: _Rule,
    ) -> None:
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._seconds = timing.compute_s.tolist()
        self._transfer_s, self._latency_s = timing.transfer_s.tolist(), timing.latency_s.tolist()
        self._limits = limits
        self._rule = rule
        self._backward, self._last = rule.parts[0], rule.parts[-1]
        self._num_stages = len(limits)
        self._done = [dict.fromkeys((Kind.F, *rule.parts), 0) for _ in limits]
        # By direction and the stage that takes them: when messages arrive; when the link is free.
        self._arrived: list[list[list[float]]] = [[[] for _ in limits] for _ in DIRECTIONS]
        self._free_s = [[0.0] * self._num_stages for _ in DIRECTIONS]
        self._clock_s = [0.0] * self._num_stages
        self._wakes: list[tuple[float, int]] = []
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in limits]

    def rows(self) -> list[Row]:
        self._wakes = [(0.0, stage) for stage in range(self._num_stages)]
        while self._wakes:
            now_s, stage = heapq.heappop(self._wakes)
            if now_s >= self._clock_s[stage]:
                kind = self._choose(stage, now_s)
                if kind is not None:
                    self._run(stage, kind, now_s)
        return [np.array(row, np.int32).reshape(-1, 3) for row in self._rows]

    def _choose(self, stage: int, now_s: float) -> Kind | None:
        done = self._done[stage]
        forwards, backwards = done[Kind.F], done[self._backward]
        if backwards < forwards and self._is_there(1, stage, backwards, now_s):
            return self._backward
        num_behind = backwards - done[self._last]
        if self._rule.stays_close and num_behind > stage:
            return Kind.W
        is_room = forwards - done[self._last] < self._limits[stage]
        if self._rule.num_extra is not None:
            num_ahead = self._num_stages - stage + self._rule.num_extra
            is_room = is_room and forwards - backwards < num_ahead
        may_go = is_room and forwards < self._num_microbatches
        if may_go and self._is_there(0, stage, forwards, now_s):
            return Kind.F
        if not num_behind:
            return None
        soon_s = now_s + self._rule.patience * self._seconds[Kind.W.index][stage]
        is_soon = self._is_there(1, stage, backwards, soon_s) and backwards < forwards
        return (
            None if is_soon or (may_go and self._is_there(0, stage, forwards, soon_s)) else Kind.W
        )

    def _is_there(self, direction: int, stage: int, microbatch: int, now_s: float) -> bool:
        if self._placement.hop_to(stage, DIRECTIONS[direction]) is None:
            return True
        arrived = self._arrived[direction][stage]
        return microbatch < len(arrived) and arrived[microbatch] <= now_s

    def _run(self, stage: int, kind: Kind, now_s: float) -> None:
        self._rows[stage].append((kind.index, stage, self._done[stage][kind]))
        self._done[stage][kind] += 1
        self._clock_s[stage] = end_s = now_s + self._seconds[kind.index][stage]
        heapq.heappush(self._wakes, (end_s, stage))
        if kind.direction is None:
            return
        hop = self._placement.hop_from(stage, kind.direction)
        if hop is None:
            return
        direction, target = DIRECTIONS.index(kind.direction), hop.target
        left_s = max(end_s, self._free_s[direction][stage]) + self._transfer_s[direction][stage]
        self._free_s[direction][stage] = left_s
        arrived_s = left_s + self._latency_s[direction][stage]
        self._arrived[direction][target].append(arrived_s)
        heapq.heappush(self._wakes, (max(arrived_s, self._clock_s[target]), target))
