"""Which version of its stage's weights each action uses, how many are kept, how old gradients are.

Version 0 is there from the start; the n-th update of a stage makes version n from version n-1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import KINDS, Kind
from pipecomm.schedule.data import ScheduleData, Weights

__all__ = ["VersionUse", "check_versions", "version_use", "weight_versions"]

_Numbers = npt.NDArray[np.int64]
_CHANGE_IN_LIVE = np.array([kind.change_in_live for kind in KINDS])


class VersionUse(NamedTuple):
    """Of one stage, the most at any time.

    live: versions kept. delay: updates between the version that a gradient was computed with and
    the one it is applied to. crossed: updates between a microbatch's forward and its backward.
    """

    live: int
    delay: int
    crossed: int


def weight_versions(schedule: ScheduleData) -> _Numbers:
    """The version that each action of `schedule.ranks.actions` uses; for U, the one it makes."""
    versions = np.zeros(len(schedule.ranks.actions), np.int64)
    if schedule.weights is not Weights.ONE:
        for places, kinds, microbatches in _stages(schedule):
            versions[places] = _versions(schedule.weights, kinds, microbatches)
    return versions


def version_use(schedule: ScheduleData) -> tuple[VersionUse, ...]:
    """How many versions each stage keeps, how late its gradients come."""
    if schedule.weights is Weights.ONE:
        return (VersionUse(1, 0, 0),) * schedule.num_stages
    versions = weight_versions(schedule)
    return tuple(
        _use(schedule.weights, kinds, microbatches, versions[places])
        for places, kinds, microbatches in _stages(schedule)
    )


def check_versions(schedule: ScheduleData) -> None:
    """Raise ConfigError unless every update has exactly the gradients it says, and versions exist.

    The lists are complete and in order.
    """
    num_updates = int((schedule.ranks.column("kind") == Kind.U.index).sum())
    if schedule.weights is Weights.ONE:
        if num_updates:
            raise ConfigError(
                f"expected no updates (U) with one version of the weights; got {num_updates}; "
                "give weights=Weights.STASHED, DOUBLE or NEWEST, or leave them out"
            )
        return
    first: list[int] | None = None
    for stage, (_, kinds, microbatches) in enumerate(_stages(schedule)):
        updated = microbatches[kinds == Kind.U.index].tolist()
        _check_gradients(stage, kinds, microbatches, schedule.num_microbatches)
        first = updated if first is None else first
        if updated != first:
            raise ConfigError(
                f"expected updates after the same microbatches on all stages; got {first[:8]} on "
                f"stage 0 and {updated[:8]} on stage {stage}"
            )
        if schedule.weights is Weights.DOUBLE:
            _check_two_versions(stage, kinds, microbatches)


def _stages(schedule: ScheduleData) -> Iterator[tuple[_Numbers, _Numbers, _Numbers]]:
    """By stage: the places of its actions in the array of all, their kinds and microbatches."""
    order = np.argsort(schedule.ranks.column("stage"), kind="stable")
    counts = np.bincount(schedule.ranks.column("stage"), minlength=schedule.num_stages)
    for places in np.split(order, np.cumsum(counts)[:-1]):
        yield (places, *schedule.ranks.actions[places][:, [0, 2]].astype(np.int64).T)


def _versions(weights: Weights, kinds: _Numbers, microbatches: _Numbers) -> _Numbers:
    is_update = kinds == Kind.U.index
    newest = np.cumsum(is_update)
    if weights is Weights.NEWEST:
        return newest
    if weights is Weights.DOUBLE:
        batch = np.searchsorted(microbatches[is_update], microbatches)
        return np.where(is_update, newest, np.maximum(batch - 1, 0))
    is_forward = kinds == Kind.F.index
    at_forward = np.zeros(int(microbatches.max(initial=0)) + 1, np.int64)
    at_forward[microbatches[is_forward]] = newest[is_forward]
    return np.where(is_update, newest, at_forward[microbatches])


def _use(weights: Weights, kinds: _Numbers, microbatches: _Numbers, used: _Numbers) -> VersionUse:
    is_update, ends = kinds == Kind.U.index, _CHANGE_IN_LIVE[kinds] == -1
    newest = np.cumsum(is_update)
    applied_to = np.searchsorted(microbatches[is_update], microbatches[ends])
    began = np.zeros(int(microbatches.max(initial=0)) + 1, np.int64)
    began[microbatches[kinds == Kind.F.index]] = newest[kinds == Kind.F.index]
    return VersionUse(
        live={Weights.DOUBLE: min(2, 1 + int(newest[-1])), Weights.NEWEST: 1}.get(
            weights, _most_live(kinds, used)
        ),
        delay=int((applied_to - used[ends]).max(initial=0)),
        crossed=int((newest[ends] - began[microbatches[ends]]).max(initial=0)),
    )


def _most_live(kinds: _Numbers, used: _Numbers) -> int:
    """The newest and those that a microbatch between its forward and its backward needs."""
    needed: Counter[int] = Counter()
    newest, most = 0, 1
    for kind, version in zip(kinds.tolist(), used.tolist(), strict=True):
        if kind == Kind.U.index:
            newest = version
        else:
            needed[version] += int(_CHANGE_IN_LIVE[kind])
            if not needed[version]:
                del needed[version]
        most = max(most, len({*needed, newest}))
    return most


def _check_gradients(
    stage: int, kinds: _Numbers, microbatches: _Numbers, num_microbatches: int
) -> None:
    is_update = kinds == Kind.U.index
    num_ended = np.cumsum(_CHANGE_IN_LIVE[kinds] == -1)
    ended_up_to = np.maximum.accumulate(np.where(_CHANGE_IN_LIVE[kinds] == -1, microbatches, -1))
    for updated, ended, latest in zip(
        microbatches[is_update], num_ended[is_update], ended_up_to[is_update], strict=True
    ):
        if ended != updated + 1 or latest != updated:
            raise ConfigError(
                f"expected {stage}U{updated} right after the backwards of microbatches 0 to "
                f"{updated}, and of no other; got {ended} of them before, the latest of "
                f"microbatch {latest}"
            )
    last = int(microbatches[is_update].max(initial=-1))
    if last != num_microbatches - 1:
        raise ConfigError(
            f"expected an update after the last microbatch, {stage}U{num_microbatches - 1}; "
            f"got {f'{stage}U{last}' if last >= 0 else 'none'} as the last of stage {stage}"
        )


def _check_two_versions(stage: int, kinds: _Numbers, microbatches: _Numbers) -> None:
    used, newest = _versions(Weights.DOUBLE, kinds, microbatches), np.cumsum(kinds == Kind.U.index)
    wrong = np.flatnonzero((used > newest) | (used < newest - 1))
    if len(wrong):
        at = wrong[0]
        raise ConfigError(
            f"expected {stage}{KINDS[kinds[at]].value}{microbatches[at]} to find version "
            f"{used[at]} among the two newest; got versions {max(0, newest[at] - 1)} and "
            f"{newest[at]}; put at least as many microbatches between updates as there are ranks"
        )
