"""What the files of the named schedules share: rows of actions, and 1F1B's three phases."""

from __future__ import annotations

import numpy as np

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Kind
from pipecomm.schedule.data import require_count
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.ranks import ActionArray, action_array

__all__ = ["Row", "Turns", "alternating", "check_batches", "of_each", "one_stage", "with_updates"]

# The list of one rank.
Row = ActionArray


def of_each(kind: Kind, stage: int, num_microbatches: int) -> Row:
    """One action for each microbatch, in order."""
    return action_array(kind, stage, np.arange(num_microbatches))


def alternating(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """Warmup forwards, then one forward and one backward in turn, then the cooldown backwards."""
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    steady = np.empty((2 * num_steady, 3), np.int32)
    steady[::2], steady[1::2] = forwards[num_warmup:], backwards[:num_steady]
    return np.concatenate([forwards[:num_warmup], steady, backwards[num_steady:]])


def one_stage(rank: int, placement: Placement, num_microbatches: int, num_warmup: int) -> Row:
    """alternating(), with whole backwards, for the one stage that the rank holds."""
    (stage,) = placement.stages_of(rank)
    forwards, backwards = (of_each(kind, stage, num_microbatches) for kind in (Kind.F, Kind.B))
    return alternating(forwards, backwards, num_warmup)


def with_updates(row: Row, every: int) -> Row:
    """An update behind the last backward of every so many microbatches."""
    ends = np.flatnonzero(np.isin(row[:, 0], (Kind.B.index, Kind.W.index)))
    ends = ends[row[ends, 2] % every == every - 1]
    updates = row[ends]
    updates[:, 0] = Kind.U.index
    return np.insert(row, ends + 1, updates, axis=0)


def check_batches(num_microbatches: int, every: int) -> None:
    """Raise ConfigError unless an update after every so many is also one after the last."""
    require_count("update_every", every)
    if num_microbatches % every:
        below = num_microbatches - num_microbatches % every
        possible = f"{below} and {below + every} are" if below else f"{every} is"
        raise ConfigError(
            f"expected a multiple of the {every} microbatches between updates; got "
            f"{num_microbatches}; {possible} possible"
        )


class Turns:
    """A row written in repeated parts: each action takes the next microbatch of its stage."""

    def __init__(self) -> None:
        self._actions: list[tuple[int, int]] = []

    def repeat(self, times: int, *actions: tuple[Kind, int]) -> None:
        """The kinds with their stages, so many times; below 1: not at all."""
        self._actions += [(kind.index, stage) for kind, stage in actions] * times

    def row(self, num_microbatches: int) -> Row:
        """What was written, less microbatches beyond so many."""
        kinds, stages = np.array(self._actions, np.int32).reshape(-1, 2).T
        numbers = np.empty_like(kinds)
        for stage in np.unique(stages):
            # A whole backward counts as both of its parts; its own number is that of I.
            for same in ((Kind.F,), (Kind.W, Kind.B), (Kind.I, Kind.B)):
                indices = [kind.index for kind in same]
                counted = np.flatnonzero((stages == stage) & np.isin(kinds, indices))
                numbers[counted] = np.arange(len(counted))
        row: Row = np.stack([kinds, stages, numbers], axis=1)
        kept: Row = row[numbers < num_microbatches]
        return kept
