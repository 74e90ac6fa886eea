"""The plain data of a schedule; everything else here is a function that reads it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import KINDS, Action, Kind
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import ActionArray, Ranks

__all__ = ["ScheduleData", "Weights", "require_count"]

_Data = TypeVar("_Data", bound="ScheduleData")


class Weights(enum.Enum):
    """Which version of its stage's weights a microbatch is computed with; U makes the next one.

    ONE: the only one; the update comes after the lists. STASHED: a forward takes the newest, its
    backward the same (PipeDream). DOUBLE: the microbatches between two updates form a batch;
    forwards and backwards of batch t take the version that was there before the update of batch
    t-1 (PipeDream-2BW). NEWEST: forward and backward take the newest each, and so may differ
    (PACI).
    """

    ONE = "one"
    STASHED = "stashed"
    DOUBLE = "double"
    NEWEST = "newest"


@dataclass(frozen=True, repr=False)
class ScheduleData:
    """`ranks[r]` is the order in which rank r computes. The name does not count for equality.

    `ranks` is given as rows of actions or as Ranks. `weights` matters where updates (U) are among
    the actions; where it is ONE they are not allowed.
    """

    name: str = field(compare=False)
    num_stages: int
    num_microbatches: int
    ranks: Ranks
    weights: Weights = Weights.ONE

    def __post_init__(self) -> None:
        require_count("num_stages", self.num_stages)
        require_count("num_microbatches", self.num_microbatches)
        object.__setattr__(self, "ranks", Ranks.of(self.ranks))

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
        return Placement.of_stages(np.unique(row.array[:, 1]).tolist() for row in self.ranks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that occur."""
        return frozenset(KINDS[kind] for kind in np.unique(self.ranks.column("kind")))

    @property
    def has_backward(self) -> bool:
        """False for a schedule that only evaluates."""
        return any(kind.direction == "backward" for kind in self.kinds)

    @classmethod
    def from_lists(
        cls: type[_Data],
        name: str,
        rows: Iterable[Iterable[Action] | ActionArray],
        weights: Weights | None = None,
    ) -> _Data:
        """A schedule of as many stages and microbatches as the lists mention.

        `weights`: None is STASHED where there are updates, else ONE.
        """
        ranks = Ranks.of(rows)
        num_stages, num_microbatches = (
            1 + int(ranks.column(column).max(initial=-1)) for column in ("stage", "microbatch")
        )
        if weights is None:
            has_updates = bool((ranks.column("kind") == Kind.U.index).any())
            weights = Weights.STASHED if has_updates else Weights.ONE
        return cls(name, num_stages, num_microbatches, ranks, weights)

    def forward_only(self: _Data) -> _Data:
        """The same order without backwards, for evaluation."""
        rows = [row.array[row.array[:, 0] == Kind.F.index] for row in self.ranks]
        return replace(self, ranks=Ranks.of(rows), weights=Weights.ONE)


def require_count(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"expected {name} to be an integer of at least 1; got {value!r}")
