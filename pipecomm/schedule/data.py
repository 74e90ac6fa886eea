"""The plain data of a schedule; everything else here is a function that reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Kind, Ranks
from pipecomm.schedule.placement import Placement

__all__ = ["ScheduleData", "require_count"]

_Data = TypeVar("_Data", bound="ScheduleData")


@dataclass(frozen=True, repr=False)
class ScheduleData:
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
            f"{type(self).__name__}({self.name!r}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches}, num_ranks={len(self.ranks)})"
        )

    @functools.cached_property
    def placement(self) -> Placement:
        """Which rank holds which stage, as the lists say: so the two cannot differ.

        Raises ConfigError if they put a stage on two ranks, or leave one out.
        """
        return Placement.of_lists(self.ranks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that occur."""
        return frozenset(action.kind for row in self.ranks for action in row)

    @property
    def has_backward(self) -> bool:
        """False for a schedule that only evaluates."""
        return any(kind.direction == "backward" for kind in self.kinds)

    @classmethod
    def from_lists(cls: type[_Data], name: str, ranks: Iterable[Iterable[Action]]) -> _Data:
        """A schedule of as many stages and microbatches as the lists mention."""
        lists = tuple(map(tuple, ranks))
        num_stages = 1 + max((action.stage for row in lists for action in row), default=-1)
        num_microbatches = 1 + max((a.microbatch for row in lists for a in row), default=-1)
        return cls(name, num_stages, num_microbatches, lists)

    def forward_only(self: _Data) -> _Data:
        """The same order without backwards, for evaluation."""
        ranks = (tuple(action for action in row if action.kind is Kind.F) for row in self.ranks)
        return replace(self, ranks=tuple(ranks))


def require_count(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"expected {name} to be an integer of at least 1; got {value!r}")
