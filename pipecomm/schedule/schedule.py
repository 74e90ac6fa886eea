"""A schedule: who does what in which order, as data, with what the other files do to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipecomm.errors import ConfigError
from pipecomm.schedule import check as checking
from pipecomm.schedule import draw as drawing
from pipecomm.schedule import simulate as simulating
from pipecomm.schedule.action import Action, Kind, Ranks
from pipecomm.schedule.lowering import add_communication
from pipecomm.schedule.table import format_table, parse_table

__all__ = ["Schedule", "require_count", "with_communication"]


@dataclass(frozen=True, repr=False)
class Schedule:
    """`ranks[r]` is the order in which rank r computes. The name does not count for equality."""

    name: str = field(compare=False)
    num_stages: int
    num_microbatches: int
    ranks: Ranks

    def __post_init__(self) -> None:
        require_count("num_stages", self.num_stages)
        require_count("num_microbatches", self.num_microbatches)
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches}, num_ranks={len(self.ranks)})"
        )

    @property
    def has_backward(self) -> bool:
        """False for a schedule that only evaluates."""
        return any(action.kind is Kind.B for row in self.ranks for action in row)

    def check(self, *, sends_block: bool = False) -> None:
        """Raise ConfigError, with the place marked, unless the schedule can be executed.

        No message travels before its receive is posted, so nothing relies on buffers between the
        ranks. With `sends_block` each send also holds its rank until then: the hardest case, in
        which the schedules of `build` still finish.
        """
        checking.check(self.ranks, self.num_stages, self.num_microbatches, sends_block)

    def peak_activations(self) -> tuple[int, ...]:
        """Per stage, the most microbatches that wait for their backward at one time."""
        if not self.has_backward:
            return (0,) * self.num_stages
        peaks = checking.peak_activations(self.ranks)
        return tuple(peaks.get(stage, 0) for stage in range(self.num_stages))

    def simulate(self, costs: simulating.Costs | None = None) -> simulating.Simulation:
        """Predict a step; without costs F and B take one second each and transfers none."""
        return simulating.simulate(
            self.ranks, self.num_stages, self.num_microbatches, costs or simulating.Costs()
        )

    def draw(self) -> str:
        """A text grid, rank by time slot, with F and B one slot each."""
        return drawing.draw(self.ranks, self.num_stages, self.num_microbatches)

    def forward_only(self) -> Schedule:
        """The same order without backwards, for evaluation."""
        ranks = (tuple(action for action in row if action.kind is Kind.F) for row in self.ranks)
        return Schedule(self.name, self.num_stages, self.num_microbatches, tuple(ranks))

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The CSV text, one row per rank, also written to `path` if given."""
        text = format_table(self.ranks)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read and check a file that to_csv or torch.distributed.pipelining (F and B only) wrote.

        The name is the file's. Raises ConfigError naming row and column, OSError if unreadable.
        """
        try:
            # utf-8-sig: spreadsheet programs put a byte order mark in front.
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"expected UTF-8 text; got {error} in {os.fspath(path)}") from None
        schedule = cls.from_lists(Path(path).stem, parse_table(text, os.fspath(path)))
        try:
            schedule.check()
        except ConfigError as error:
            raise ConfigError(f"{error}\n(read from {os.fspath(path)})") from None
        return schedule

    @classmethod
    def from_lists(cls, name: str, ranks: Iterable[Iterable[Action]]) -> Schedule:
        """A schedule of as many stages and microbatches as the lists mention."""
        lists = tuple(map(tuple, ranks))
        num_stages = 1 + max((action.stage for row in lists for action in row), default=-1)
        num_microbatches = 1 + max((a.microbatch for row in lists for a in row), default=-1)
        return cls(name, num_stages, num_microbatches, lists)


def with_communication(schedule: Schedule) -> Ranks:
    """Per rank, the actions to execute: `schedule` with sends and receives put in.

    F and B wait for their own receive; SEND and RECV are posted without waiting. Receives are
    posted one microbatch ahead. See lowering.py.
    """
    return add_communication(schedule.ranks)


def require_count(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"expected {name} to be an integer of at least 1; got {value!r}")
