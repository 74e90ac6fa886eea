"""What one rank does in one step, said before it begins and passed down to all who take part.

Makes the plans of training, from a checked schedule, and of evaluation.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from pipecomm.errors import ConfigError
from pipecomm.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    build,
    forward_rounds,
    with_communication,
)

__all__ = ["Plan", "check_schedule", "evaluation_plan", "training_plan"]

_EXECUTABLE = {Kind.F, Kind.B}


@dataclass(frozen=True)
class Plan:
    """One rank's `actions`, its sends and receives among them.

    trains: gradients are wanted; without, forwards keep nothing, whatever torch's grad mode is.
    """

    trains: bool
    num_microbatches: int
    placement: Placement
    actions: tuple[Action, ...]

    @functools.cached_property
    def reducing(self) -> frozenset[Action]:
        """The last backward of each stage: with it data-parallel wrappers reduce."""
        last = {action.stage: action for action in self.actions if action.kind is Kind.B}
        return frozenset(last.values())

    @functools.cached_property
    def max_open_sends(self) -> int | None:
        """How many messages may wait to leave; None: as many as the actions let come up.

        Bounds memory where nothing comes back that would hold this rank up. Where activations
        come back to a rank, waiting for a send could keep it from what lets the send go.
        """
        rank_of = self.placement.rank_of
        goes_down = all(upper <= lower for upper, lower in itertools.pairwise(rank_of))
        return 2 * self.placement.num_stages if goes_down else None


def check_schedule(
    schedule: str | Schedule, num_chunks: int, rank: int, size: int, num_microbatches: int
) -> Schedule:
    """The schedule for `size` ranks of which this one has `num_chunks` stages, checked.

    Raises ConfigError for an unknown name, one that has no form of this size, a Schedule of other
    sizes, one that cannot be executed, and one that puts another number of stages on this rank.
    """
    if isinstance(schedule, str):
        built = build(schedule, num_chunks * size, num_microbatches, size)
        _check_executable(built)
        return built
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"expected the name of a schedule or a Schedule; got {schedule!r}")
    num_held = len({action.stage for row in schedule.ranks[rank : rank + 1] for action in row})
    if len(schedule.ranks) != size or num_held != num_chunks:
        raise ConfigError(
            f"expected a schedule for {size} ranks with {num_chunks} stages on rank {rank}, one "
            f"for each module given there; got {schedule.num_stages} stages on "
            f"{len(schedule.ranks)} ranks, {num_held} of them on rank {rank} ({schedule.name})"
        )
    if num_microbatches not in (1, schedule.num_microbatches):
        raise ConfigError(
            f"expected num_microbatches as in the schedule, {schedule.num_microbatches}; "
            f"got {num_microbatches}"
        )
    schedule.check()
    _check_executable(schedule)
    return schedule


def _check_executable(schedule: Schedule) -> None:
    others = sorted(kind.value for kind in schedule.kinds - _EXECUTABLE)
    if others:
        raise ConfigError(
            f"expected a schedule of F and B; got {', '.join(others)} in {schedule.name!r}: "
            "backwards split into I and W, and updates (U), can be checked and simulated, not yet "
            "executed"
        )


def training_plan(schedule: Schedule, rank: int) -> Plan:
    """The actions of `rank` in a checked schedule."""
    actions = tuple(with_communication(schedule)[rank])
    return Plan(True, schedule.num_microbatches, schedule.placement, actions)


@functools.lru_cache(maxsize=16)
def evaluation_plan(placement: Placement, num_microbatches: int, rank: int) -> Plan:
    """Forwards only, of any number of microbatches, whatever the schedule of training."""
    actions = tuple(with_communication(forward_rounds(placement, num_microbatches))[rank])
    return Plan(False, num_microbatches, placement, actions)
