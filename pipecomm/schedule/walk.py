"""Runs lowered lists against a clock: the one interpretation of what each action waits for.

Serves the checker (no time passes, is there a deadlock?) and the simulator (when does what
happen?). Every list is walked until it must wait; a transfer that becomes possible wakes those
who wait for it. Each action is handled once and waits at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipecomm.schedule.action import Action, Kind, Ranks
from pipecomm.schedule.lowering import receive_for, stage_owners

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

    `compute_s(action)` and `transfer_s(send)` give seconds; a message arrives `latency_s` after
    it has left the link. `slots` messages per channel may travel before their receive is
    posted. With `sends_block`, a rank stands still until its message has left.
    """

    compute_s: Callable[[Action], float]
    transfer_s: Callable[[Action], float]
    latency_s: float
    slots: int
    sends_block: bool


class Stuck(Exception):
    """No rank can go on. `positions[rank]` is the place in its lowered list where it waits."""

    def __init__(self, positions: dict[int, int]) -> None:
        super().__init__(positions)
        self.positions = positions


@dataclass(slots=True)
class _Channel:
    """Messages in one direction into one stage; the n-th send meets the n-th receive."""

    sends: list[tuple[float, Action]] = field(default_factory=list)
    posts: list[float] = field(default_factory=list)
    # Per message: both sides were ready, it entered the link, it left the link, it arrived.
    transfers: list[tuple[float, float, float, float]] = field(default_factory=list)
    index_of: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    def start_transfers(self, timing: Timing) -> bool:
        """Give a time to every message that can travel now; True if there was one."""
        before = len(self.transfers)
        while len(self.transfers) < min(len(self.sends), len(self.posts) + timing.slots):
            index = len(self.transfers)
            ready, send = self.sends[index]
            if index >= timing.slots:
                ready = max(ready, self.posts[index - timing.slots])
            start = max(ready, self.transfers[-1][2]) if index else ready
            left = start + timing.transfer_s(send)
            self.transfers.append((ready, start, left, left + timing.latency_s))
        return len(self.transfers) > before


class Walk:
    """A finished walk: `clock_s`, `busy_s` and `exposed_comm_s` per rank, and its events."""

    def __init__(self, lowered: Ranks, timing: Timing) -> None:
        self.clock_s = [0.0] * len(lowered)
        self.busy_s = [0.0] * len(lowered)
        self.exposed_comm_s = [0.0] * len(lowered)
        self.events: list[Event] = []
        self._lowered = lowered
        self._timing = timing
        self._owners = stage_owners(lowered)
        self._positions = [0] * len(lowered)
        self._held_by: list[tuple[_Channel, int] | None] = [None] * len(lowered)
        self._done: list[set[tuple[bool, int, int]]] = [set() for _ in lowered]
        self._ready: deque[int] = deque()
        # Keyed by (is forward, receiving stage).
        self._channels: dict[tuple[bool, int], _Channel] = {}

    def run(self) -> None:
        """Walk all lists to their ends. Raises Stuck."""
        self._ready.extend(range(len(self._lowered)))
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = {
            rank: self._positions[rank] - (self._held_by[rank] is not None)
            for rank, actions in enumerate(self._lowered)
            if self._positions[rank] < len(actions) or self._held_by[rank] is not None
        }
        if stuck:
            raise Stuck(stuck)
        self._add_transfer_events()

    def _advance(self, rank: int) -> None:
        actions = self._lowered[rank]
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
        if index >= len(channel.transfers):
            channel.waiting.append(rank)
            return False
        ready, _, left, _ = channel.transfers[index]
        self._stand_still(rank, ready, left)
        self._held_by[rank] = None
        return True

    def _stand_still(self, rank: int, ready: float, until: float) -> None:
        """Wait for a transfer; what of the wait was spent on the link is exposed communication."""
        self.exposed_comm_s[rank] += max(0.0, until - max(self.clock_s[rank], ready))
        self.clock_s[rank] = max(self.clock_s[rank], until)

    def _post(self, rank: int, action: Action) -> None:
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            channel = self._channel(is_forward, action.stage)
            channel.index_of[action.microbatch] = len(channel.posts)
            channel.posts.append(self.clock_s[rank])
        else:
            channel = self._channel(is_forward, action.stage + (1 if is_forward else -1))
            channel.sends.append((self.clock_s[rank], action))
            if self._timing.sends_block:
                self._held_by[rank] = (channel, len(channel.sends) - 1)
        if channel.start_transfers(self._timing):
            self._ready.extend(channel.waiting)
            channel.waiting.clear()

    def _compute(self, rank: int, action: Action) -> bool:
        """Run a compute action if its input is there; False if it must wait."""
        if not self._has_input(rank, action):
            return False
        start = self.clock_s[rank]
        seconds = self._timing.compute_s(action)
        self.clock_s[rank] = start + seconds
        self.busy_s[rank] += seconds
        self._done[rank].add((action.kind is Kind.F, action.stage, action.microbatch))
        self.events.append(Event(rank, action, start, start + seconds))
        return True

    def _has_input(self, rank: int, action: Action) -> bool:
        is_forward = action.kind is Kind.F
        if receive_for(action, self._owners) is not None:
            return self._has_received(rank, self._channel(is_forward, action.stage), action)
        source = action.stage - 1 if is_forward else action.stage + 1
        made_here = (is_forward, source, action.microbatch)
        return source not in self._owners or made_here in self._done[rank]

    def _has_received(self, rank: int, channel: _Channel, action: Action) -> bool:
        index = channel.index_of.get(action.microbatch)
        if index is None or index >= len(channel.transfers):
            channel.waiting.append(rank)
            return False
        ready, _, _, arrived = channel.transfers[index]
        self._stand_still(rank, ready, arrived)
        return True

    def _channel(self, is_forward: bool, stage: int) -> _Channel:
        return self._channels.setdefault((is_forward, stage), _Channel())

    def _add_transfer_events(self) -> None:
        for channel in self._channels.values():
            for (_, send), (_, start, _, arrived) in zip(
                channel.sends, channel.transfers, strict=True
            ):
                self.events.append(Event(self._owners[send.stage], send, start, arrived))


def walk(lowered: Ranks, timing: Timing) -> Walk:
    """Run lowered lists to their end. Raises Stuck on a deadlock."""
    finished = Walk(lowered, timing)
    finished.run()
    return finished
