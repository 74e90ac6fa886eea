"""Runs a schedule against a clock, in the core: when does what happen, and is there a deadlock?

Serves the checker (no time passes) and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipecomm.schedule.action import KINDS, Action
from pipecomm.schedule.core_lists import core_lists
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.ranks import Row

__all__ = ["Event", "Progress", "Stuck", "Timing", "Walk", "walk"]

Progress = Callable[[float], None]
_Seconds = npt.NDArray[np.float64]


class Event(NamedTuple):
    """`action` took place on `rank` from `start_s` to `end_s`, in seconds from the step's start.

    For a SEND that is the time its message was on the link, not the time of posting it.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float


class Timing(NamedTuple):
    """How long things take, and how far a sender may run ahead of its receiver.

    compute_s: shape (kinds, stages), by Kind.index. transfer_s, latency_s: shape (2, stages), by
    direction (forward, backward) and the stage that sends: how long its message keeps the link
    busy, how much later it arrives. `slots` messages per channel may travel before their receive
    is posted, `max_in_flight` (0: any number) may be on their way at one time. With
    `sends_block`, a rank stands still until its message has left.
    """

    compute_s: _Seconds
    transfer_s: _Seconds
    latency_s: _Seconds
    slots: int = 0
    max_in_flight: int = 0
    sends_block: bool = False

    @classmethod
    def none(cls, num_stages: int, *, sends_block: bool = False) -> Timing:
        """No time passes."""
        of_messages = np.zeros((2, num_stages))
        of_compute = np.zeros((len(KINDS), num_stages))
        return cls(of_compute, of_messages, of_messages, sends_block=sends_block)


class Stuck(Exception):
    """No rank can go on. `positions[rank]` is the place in its lowered list where it waits."""

    def __init__(self, positions: dict[int, int]) -> None:
        super().__init__(positions)
        self.positions = positions


class Walk:
    """A finished walk.

    By rank: `clock_s` (its end), `busy_s`, `exposed_comm_s`. `start_s`, `end_s`: of each compute
    action, in the order of `schedule.ranks.actions`.
    """

    def __init__(self, schedule: ScheduleData, timing: Timing, found: dict[str, Any]) -> None:
        self.clock_s: _Seconds = found["clock_s"]
        self.busy_s: _Seconds = found["busy_s"]
        self.exposed_comm_s: _Seconds = found["exposed_comm_s"]
        self.start_s: _Seconds = found["start_s"]
        self._schedule = schedule
        self._timing = timing
        self._messages = found

    @property
    def end_s(self) -> _Seconds:
        ranks = self._schedule.ranks
        seconds: _Seconds = self._timing.compute_s[ranks.column("kind"), ranks.column("stage")]
        return self.start_s + seconds

    @property
    def num_messages(self) -> int:
        return len(self._messages["sends"])

    def events(self) -> Iterator[Event]:
        """What happened when: each rank's compute in its order, then each channel's messages."""
        ranks = self._schedule.ranks
        senders = np.repeat(np.arange(len(ranks)), np.diff(ranks.offsets))
        yield from map(
            Event, senders.tolist(), Row(ranks.actions), self.start_s.tolist(), self.end_s.tolist()
        )
        messages = self._messages
        yield from map(
            Event,
            messages["senders"].tolist(),
            Row(messages["sends"]),
            messages["message_start_s"].tolist(),
            messages["message_end_s"].tolist(),
        )


def walk(schedule: ScheduleData, timing: Timing, progress: Progress | None = None) -> Walk:
    """Lower a schedule's lists and run them to their end. Raises Stuck on a deadlock.

    `progress` is called from time to time with the share that is done.
    """
    found = core_lists(schedule.ranks, schedule.placement).walk(
        timing.compute_s,
        timing.transfer_s,
        timing.latency_s,
        timing.slots,
        timing.max_in_flight,
        timing.sends_block,
        progress,
    )
    waits = found["stuck_at"]
    if len(waits):
        raise Stuck({rank: at for rank, at in enumerate(waits.tolist()) if at >= 0})
    return Walk(schedule, timing, found)
