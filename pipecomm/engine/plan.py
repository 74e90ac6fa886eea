"""What one rank does in one step, said before it begins and passed down to all who take part.

Makes the plans of training, from a checked schedule, and of evaluation.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipecomm.errors import ConfigError
from pipecomm.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    Weights,
    build,
    forward_rounds,
    weight_versions,
    with_communication,
)

__all__ = ["AUTO", "Plan", "check_schedule", "evaluation_plan", "training_plan"]

# Chosen by what the first steps take.
AUTO = "auto"


@dataclass(frozen=True)
class Plan:
    """One rank's `actions`, its sends and receives among them.

    trains: gradients are wanted; without, forwards keep nothing, whatever torch's grad mode is.
    """

    trains: bool
    num_microbatches: int
    placement: Placement
    actions: tuple[Action, ...]
    # Of an asynchronous schedule: the version of its stage's weights that an action uses, and for
    # an update the one that its gradients were computed with.
    versions: Mapping[Action, int] = field(default_factory=dict)
    # The last microbatch of each update, the same on all stages.
    updates: tuple[int, ...] = ()

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated within a step."""
        return bool(self.updates)

    def uses(self, stage: int) -> Counter[int]:
        """How many actions of `stage` use each version."""
        return Counter(v for action, v in self.versions.items() if action.stage == stage)

    @functools.cached_property
    def reducing(self) -> frozenset[Action]:
        """The last end of a backward on each stage: with it data-parallel wrappers reduce."""
        ends = (action for action in self.actions if action.kind.change_in_live < 0)
        return frozenset({action.stage: action for action in ends}.values())

    @functools.cached_property
    def splits(self) -> bool:
        """Whether backwards are in two parts: all of them then, as stages may share layers."""
        return any(action.kind is Kind.I for action in self.actions)

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
    sizes, one that cannot reach its end, and one that puts another number of stages on this rank.
    """
    if schedule == AUTO:
        return _first_schedule(num_chunks, size, num_microbatches)
    if isinstance(schedule, str):
        return build(schedule, num_chunks * size, num_microbatches, size)
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
    return schedule


def _first_schedule(num_chunks: int, size: int, num_microbatches: int) -> Schedule:
    """What is run until there are measurements. Raises ConfigError for sizes that have no form."""
    num_stages = num_chunks * size
    if num_chunks == 1:
        return build("1f1b", num_stages, num_microbatches, size)
    try:
        return build("interleaved", num_stages, num_microbatches, size)
    except ConfigError:
        return build("looped-bfs", num_stages, num_microbatches, size)


def training_plan(schedule: Schedule, rank: int) -> Plan:
    """The actions of `rank` in a checked schedule."""
    actions = tuple(with_communication(schedule)[rank])
    size = (schedule.num_microbatches, schedule.placement)
    if schedule.weights is Weights.ONE:
        return Plan(True, *size, actions)
    updates = {a.microbatch for row in schedule.ranks for a in row if a.kind is Kind.U}
    return Plan(True, *size, actions, _versions(schedule, rank), tuple(sorted(updates)))


def _versions(schedule: Schedule, rank: int) -> dict[Action, int]:
    """By action of `rank`; what an update makes is what the schedule says of it instead."""
    row = schedule.ranks[rank]
    first = int(schedule.ranks.offsets[rank])
    used = weight_versions(schedule)[first : first + len(row)].tolist()
    versions = dict(zip(row, used, strict=True))
    for action in row:
        if action.kind is Kind.U:
            ends = (action._replace(kind=kind) for kind in Kind.U.after)
            versions[action] = next(versions[end] for end in ends if end in versions)
    return versions


@functools.lru_cache(maxsize=16)
def evaluation_plan(placement: Placement, num_microbatches: int, rank: int) -> Plan:
    """Forwards only, of any number of microbatches, whatever the schedule of training."""
    actions = tuple(with_communication(forward_rounds(placement, num_microbatches))[rank])
    return Plan(False, num_microbatches, placement, actions)
