"""The schedule that users hold: its data, with the functions of the other files as methods."""

from __future__ import annotations

import os
from pathlib import Path

from pipecomm.errors import ConfigError
from pipecomm.schedule import check as checking
from pipecomm.schedule import draw as drawing
from pipecomm.schedule import memory
from pipecomm.schedule import simulate as simulating
from pipecomm.schedule.costs import Costs
from pipecomm.schedule.data import ScheduleData, Weights
from pipecomm.schedule.table import format_table, parse_table
from pipecomm.schedule.walk import Progress

__all__ = ["Schedule"]


class Schedule(ScheduleData):
    """Who computes what in which order: `ranks[r]` is the list of rank r."""

    def check(self, *, sends_block: bool = False) -> None:
        """Raise ConfigError, with the place marked, unless the schedule can be executed.

        No message travels before its receive is posted, so nothing relies on buffers between the
        ranks. With `sends_block` each send also holds its rank until then: the hardest case, in
        which the schedules of `build` with one stage per rank still finish.
        """
        checking.check(self, sends_block=sends_block)

    def peak_activations(self) -> tuple[int, ...]:
        """Per stage, the most microbatches that wait for the end of their backward at one time."""
        return memory.peak_activations(self)

    def simulate(
        self, costs: Costs | None = None, progress: Progress | None = None
    ) -> simulating.Simulation:
        """Predict a step; without costs F and B take one second each and transfers none.

        `progress` is called now and then with the share that is done.
        """
        return simulating.simulate(self, costs or Costs(), progress)

    def draw(self, costs: Costs | None = None) -> str:
        """A text grid, rank by time slot, with each compute action one slot.

        Where backwards are split, a whole one takes the two slots of its parts. With `costs`, in
        whole seconds, a slot is a second.
        """
        return drawing.draw(self, costs)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The CSV text, one row per rank, also written to `path` if given."""
        text = format_table(self.ranks)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], weights: Weights | None = None) -> Schedule:
        """Read and check a file that to_csv or torch.distributed.pipelining (compute only) wrote.

        The name is the file's. `weights`: which version a microbatch is computed with, which no
        file says; None is STASHED where there are updates, else ONE. Raises ConfigError naming
        row and column, OSError if unreadable.
        """
        try:
            # utf-8-sig: spreadsheet programs put a byte order mark in front.
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"expected UTF-8 text; got {error} in {os.fspath(path)}") from None
        schedule = cls.from_lists(Path(path).stem, parse_table(text, os.fspath(path)), weights)
        try:
            schedule.check()
        except ConfigError as error:
            raise ConfigError(f"{error}\n(read from {os.fspath(path)})") from None
        return schedule
