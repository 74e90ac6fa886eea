"""Runs a schedule against a clock: the one interpretation of what each action waits for.

Serves the checker (no time passes, is there a deadlock?) and the simulator (when does what
happen?). Every lowered list is walked until it must wait; a transfer that becomes possible wakes
those who wait for it. Each action is handled once and waits at most once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipecomm.schedule.action import Action, Direction, Kind
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.lowering import with_communication
from pipecomm.schedule.placement import Hop

__all__ = ["Event", "Stuck", "Timing", "Walk", "walk"]


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

    `compute_s[kind][stage]` and `transfer_s[direction][boundary]` are seconds; a message arrives
    `latency_s` after it has left the link. `slots` messages per channel may travel before their
    receive is posted. With `sends_block`, a rank stands still until its message has left.
    """

    compute_s: Mapping[Kind, Sequence[float]]
    transfer_s: Mapping[Direction, Sequence[float]]
    latency_s: float
    slots: int
    sends_block: bool


class Stuck(Exception):
    """No rank can go on. `positions[rank]` is the place in its lowered list where it waits."""

    def __init__(self, positions: dict[int, int]) -> None:
        super().__init__(positions)
        self.positions = positions


class _Channel:
    """Messages from one rank to another in one direction, whatever their stages.

    The n-th send meets the n-th receive, which the n-th compute action that takes one waits for.
    """

    def __init__(self, slots: int) -> None:
        # The ranks that wait for a transfer to begin.
        self.waiting: list[int] = []
        self.sends: list[Action] = []
        self.num_used = 0
        # Per message: both sides were ready, it entered the link, it left the link.
        self.ready_s, self.start_s, self.left_s = array("d"), array("d"), array("d")
        # The first messages find slots, each later one a receive posted so much earlier.
        self._posted_s = array("d", [0.0] * slots)
        self._made: deque[tuple[float, float]] = deque()

    def post(self, now_s: float) -> bool:
        """Post the next receive; True if a transfer begins."""
        self._posted_s.append(now_s)
        return self._begin_transfer()

    def send(self, action: Action, now_s: float, transfer_s: float) -> bool:
        """Send the next message; True if a transfer begins."""
        self.sends.append(action)
        self._made.append((now_s, transfer_s))
        return self._begin_transfer()

    def _begin_transfer(self) -> bool:
        index = len(self.left_s)
        if not self._made or index == len(self._posted_s):
            return False
        made_s, transfer_s = self._made.popleft()
        ready_s = max(made_s, self._posted_s[index])
        start_s = max(ready_s, self.left_s[-1]) if index else ready_s
        self.ready_s.append(ready_s)
        self.start_s.append(start_s)
        self.left_s.append(start_s + transfer_s)
        return True


@dataclass(slots=True)
class _Way:
    """A hop on the clock: over a channel or, where there is none, in the memory of its rank."""

    transfer_s: float
    channel: _Channel | None
    # The microbatches whose result is in memory.
    made: set[int] = field(default_factory=set)


class Walk:
    """A finished walk: `clock_s`, `busy_s` and `exposed_comm_s` per rank, and its events."""

    def __init__(self, schedule: ScheduleData, timing: Timing) -> None:
        num_ranks = len(schedule.ranks)
        self.clock_s, self.busy_s, self.exposed_comm_s = ([0.0] * num_ranks for _ in range(3))
        self._schedule = schedule
        self._timing = timing
        self._starts_s = [array("d") for _ in range(num_ranks)]
        self._positions = [0] * num_ranks
        self._held_by: list[tuple[_Channel, int] | None] = [None] * num_ranks
        self._ready = deque(range(num_ranks))
        self._channels: dict[tuple[Direction, int, int], _Channel] = {}
        placement = schedule.placement
        ways: dict[Hop | None, _Way] = {hop: self._way(hop) for hop in placement.hops}
        # By kind and stage; None where nothing comes, or goes.
        self._to, self._from = (
            {kind: [ways.get(hop) for hop in hops] for kind, hops in table.items()}
            for table in (placement.hops_in, placement.hops_out)
        )

    def _way(self, hop: Hop) -> _Way:
        seconds = self._timing.transfer_s[hop.direction][hop.boundary]
        if not hop.is_message:
            return _Way(seconds, None)
        channel = self._channels.setdefault(hop.channel, _Channel(self._timing.slots))
        return _Way(seconds, channel)

    def run(self) -> None:
        """Walk all lists to their ends. Raises Stuck."""
        lowered = with_communication(self._schedule)
        while self._ready:
            rank = self._ready.popleft()
            self._advance(rank, lowered[rank])
        stuck = {
            rank: self._positions[rank] - (self._held_by[rank] is not None)
            for rank, actions in enumerate(lowered)
            if self._positions[rank] < len(actions) or self._held_by[rank] is not None
        }
        if stuck:
            raise Stuck(stuck)

    def _advance(self, rank: int, actions: Sequence[Action]) -> None:
        while self._release(rank) and self._positions[rank] < len(actions):
            action = actions[self._positions[rank]]
            if action.kind.is_compute:
                if not self._compute(rank, action):
                    return
            else:
                self._post(rank, action)
            self._positions[rank] += 1

    def _release(self, rank: int) -> bool:
        """False while the rank's own blocking send has not left."""
        held_by = self._held_by[rank]
        if held_by is None:
            return True
        channel, index = held_by
        if index >= len(channel.left_s):
            channel.waiting.append(rank)
            return False
        self._stand_still(rank, channel.ready_s[index], channel.left_s[index])
        self._held_by[rank] = None
        return True

    def _stand_still(self, rank: int, ready_s: float, until_s: float) -> None:
        """Wait for a transfer; what of the wait was spent on the link is exposed communication."""
        self.exposed_comm_s[rank] += max(0.0, until_s - max(self.clock_s[rank], ready_s))
        self.clock_s[rank] = max(self.clock_s[rank], until_s)

    def _post(self, rank: int, action: Action) -> None:
        ways = self._from if action.kind.is_send else self._to
        way = ways[action.kind][action.stage]
        assert way is not None
        assert way.channel is not None
        channel = way.channel
        if not action.kind.is_send:
            begins = channel.post(self.clock_s[rank])
        else:
            begins = channel.send(action, self.clock_s[rank], way.transfer_s)
            if self._timing.sends_block:
                self._held_by[rank] = (channel, len(channel.sends) - 1)
        if begins:
            self._ready.extend(channel.waiting)
            channel.waiting.clear()

    def _compute(self, rank: int, action: Action) -> bool:
        """Run a compute action if its input is there; False if it must wait."""
        way = self._to[action.kind][action.stage]
        if way is not None and not self._take(rank, way, action.microbatch):
            return False
        seconds = self._timing.compute_s[action.kind][action.stage]
        self._starts_s[rank].append(self.clock_s[rank])
        self.clock_s[rank] += seconds
        self.busy_s[rank] += seconds
        way = self._from[action.kind][action.stage]
        if way is not None and way.channel is None:
            way.made.add(action.microbatch)
        return True

    def _take(self, rank: int, way: _Way, microbatch: int) -> bool:
        channel = way.channel
        if channel is None:
            # If the rank makes it later, nothing can wake it.
            return microbatch in way.made
        index = channel.num_used
        if index >= len(channel.left_s):
            channel.waiting.append(rank)
            return False
        channel.num_used += 1
        arrived_s = channel.left_s[index] + self._timing.latency_s
        self._stand_still(rank, channel.ready_s[index], arrived_s)
        return True

    def events(self) -> Iterator[Event]:
        """What happened when: each rank's compute in its order, then each channel's messages."""
        for rank, (row, starts_s) in enumerate(
            zip(self._schedule.ranks, self._starts_s, strict=True)
        ):
            for action, start_s in zip(row, starts_s, strict=True):
                seconds = self._timing.compute_s[action.kind][action.stage]
                yield Event(rank, action, start_s, start_s + seconds)
        for (_, sender, _), channel in self._channels.items():
            for send, start_s, left_s in zip(
                channel.sends, channel.start_s, channel.left_s, strict=True
            ):
                yield Event(sender, send, start_s, left_s + self._timing.latency_s)


def walk(schedule: ScheduleData, timing: Timing) -> Walk:
    """Lower a schedule's lists and run them to their end. Raises Stuck on a deadlock."""
    finished = Walk(schedule, timing)
    finished.run()
    return finished
