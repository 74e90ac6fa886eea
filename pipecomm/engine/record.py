"""What one rank does in a step, noted while it does it and worked out when somebody asks.

A note is a tuple: whatever it takes to make numbers and events of it is not taken from the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipecomm.engine.stats import StepStats
from pipecomm.schedule import Action

if TYPE_CHECKING:
    from pipecomm.links.link import Transfer

__all__ = ["Record"]

# From when to when, in seconds of time.monotonic().
_Span = tuple[float, float]


class Record:
    """Of one step, which `keeps` activations or not. Its numbers are as in StepStats."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.step_s = 0.0
        self.weight_versions = 1
        self.updates_left_out = 0
        self._computed: list[tuple[Action, float, float]] = []
        self._moved: list[tuple[str, Action, Transfer, _Span | None]] = []

    def add_compute(self, action: Action, start_s: float, end_s: float) -> None:
        self._computed.append((action, start_s, end_s))

    def add_transfer(
        self, lane: str, action: Action, transfer: Transfer, waited_s: _Span | None
    ) -> None:
        """A finished one; see StepStats.add_transfer."""
        self._moved.append((lane, action, transfer, waited_s))

    def stats(self) -> StepStats:
        """All of it, worked out anew."""
        stats = StepStats(
            self.step_s,
            weight_versions=self.weight_versions,
            updates_left_out=self.updates_left_out,
        )
        for computed in self._computed:
            stats.add_compute(*computed)
        if not self._keeps:
            stats.peak_activations = 0
        for moved in self._moved:
            stats.add_transfer(*moved)
        stats.events.sort(key=lambda event: event.start_s)
        return stats
