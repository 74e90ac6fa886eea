"""Which rank holds which stage, and so who sends to whom.

The one place that knows which stage is next to which: nothing else computes an index plus or
minus one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Direction, Kind

__all__ = ["Hop", "Placement"]


class Hop(NamedTuple):
    """The way of a result in `direction` over `boundary`, which joins stages k and k+1.

    From stage `source` on rank `sender` to stage `target` on rank `receiver`.
    """

    direction: Direction
    boundary: int
    source: int
    target: int
    sender: int
    receiver: int

    @property
    def is_message(self) -> bool:
        """False where one rank holds both stages: the result stays in its memory."""
        return self.sender != self.receiver

    @property
    def channel(self) -> tuple[Direction, int, int]:
        """What its messages share with those of other hops between the same ranks: their order."""
        return (self.direction, self.sender, self.receiver)


@dataclass(frozen=True)
class Placement:
    """`rank_of[s]` is the rank of stage s; every rank from 0 to the highest holds a stage.

    Raises ConfigError for anything else.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of", tuple(self.rank_of))
        if not self.rank_of or sorted(set(self.rank_of)) != list(range(self.num_ranks)):
            raise ConfigError(
                f"expected the rank of each stage, and a stage on every rank; got {self.rank_of}"
            )

    @classmethod
    def linear(cls, num_stages: int, num_ranks: int) -> Placement:
        """Stage s on rank s."""
        if num_stages != num_ranks:
            raise _wrong_size("as many stages as ranks", num_stages, num_ranks)
        return cls(tuple(range(num_stages)))

    @classmethod
    def looped(cls, num_stages: int, num_ranks: int) -> Placement:
        """Stage s on rank s mod P of P ranks: each goes around all ranks again."""
        if num_stages % num_ranks:
            raise _wrong_size("the same number of stages on every rank", num_stages, num_ranks)
        return cls(tuple(stage % num_ranks for stage in range(num_stages)))

    @classmethod
    def v_shaped(cls, num_stages: int, num_ranks: int) -> Placement:
        """Stages down the ranks and up again: s and 2P-1-s on rank s of P ranks."""
        if num_stages != 2 * num_ranks:
            raise _wrong_size("two stages on every rank", num_stages, num_ranks)
        down = range(num_ranks)
        return cls((*down, *reversed(down)))

    @classmethod
    def of_stages(cls, stages: Iterable[Iterable[int]]) -> Placement:
        """The placement with these stages on the first rank, those on the next, and so on."""
        rank_of: dict[int, int] = {}
        for rank, held in enumerate(stages):
            for stage in held:
                if rank_of.setdefault(stage, rank) != rank:
                    raise ConfigError(
                        f"expected stage {stage} on one rank; got it on {rank_of[stage]} and {rank}"
                    )
        missing = [stage for stage in range(len(rank_of)) if stage not in rank_of]
        if missing:
            raise ConfigError(f"expected stages 0 to {max(rank_of)}; got none of {missing[0]}")
        return cls(tuple(rank_of[stage] for stage in range(len(rank_of))))

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def num_boundaries(self) -> int:
        """Boundary k joins stages k and k+1."""
        return self.num_stages - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks with which a rank exchanges messages, in order."""
        pairs = [hop[-2:] for hop in self.hops if hop.is_message and rank in hop[-2:]]
        return tuple(sorted({peer for pair in pairs for peer in pair if peer != rank}))

    @property
    def first_rank(self) -> int:
        """The rank that takes the inputs."""
        return self.rank_of[0]

    @property
    def last_rank(self) -> int:
        """The rank that has the loss."""
        return self.rank_of[-1]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Every hop, both ways over each boundary."""
        return tuple(self._hops.values())

    def hop_over(self, boundary: int, direction: Direction) -> Hop:
        """The way over a boundary. Raises KeyError for a boundary that does not exist."""
        return self._hops[direction, boundary]

    def hop_from(self, stage: int, direction: Direction) -> Hop | None:
        """The way of what a stage makes; None at the end: nobody takes it."""
        return self._hops.get((direction, stage if direction == "forward" else stage - 1))

    def hop_to(self, stage: int, direction: Direction) -> Hop | None:
        """The way of what a stage takes; None at the end: it comes from no stage."""
        return self._hops.get((direction, stage - 1 if direction == "forward" else stage))

    @functools.cached_property
    def hops_in(self) -> Mapping[Kind, Sequence[Hop | None]]:
        """By kind and stage, for those who ask for every action: the way of what it takes.

        None where it takes nothing from a stage.
        """
        return self._by_kind_and_stage(self.hop_to)

    @functools.cached_property
    def hops_out(self) -> Mapping[Kind, Sequence[Hop | None]]:
        """By kind and stage: the way of what an action makes; None where no stage takes it."""
        return self._by_kind_and_stage(self.hop_from)

    def _by_kind_and_stage(
        self, find: Callable[[int, Direction], Hop | None]
    ) -> Mapping[Kind, Sequence[Hop | None]]:
        return {
            kind: [
                None if kind.direction is None else find(stage, kind.direction)
                for stage in range(self.num_stages)
            ]
            for kind in Kind
        }

    @functools.cached_property
    def _hops(self) -> dict[tuple[Direction, int], Hop]:
        hops: dict[tuple[Direction, int], Hop] = {}
        for k, (upper, lower) in enumerate(zip(self.rank_of, self.rank_of[1:], strict=False)):
            hops["forward", k] = Hop("forward", k, k, k + 1, upper, lower)
            hops["backward", k] = Hop("backward", k, k + 1, k, lower, upper)
        return hops


def _wrong_size(expected: str, num_stages: int, num_ranks: int) -> ConfigError:
    return ConfigError(f"expected {expected}; got {num_stages} stages on {num_ranks} ranks")
