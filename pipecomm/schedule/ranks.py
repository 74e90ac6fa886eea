"""The lists of all ranks as one array of numbers; rows and actions are made when looked at.

A schedule of a thousand ranks has millions of actions: 12 bytes each here, a hundred as objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import KINDS, Action, Kind

__all__ = ["ActionArray", "Ranks", "Row", "action_array", "pack"]

# Shape (actions, 3), int32: index of the kind, stage, microbatch.
ActionArray = npt.NDArray[np.int32]


def action_array(kind: Kind, stage: int, microbatches: npt.ArrayLike) -> ActionArray:
    """An action of `kind` on `stage` for each of the microbatches, in their order."""
    numbers = np.asarray(microbatches, np.int32)
    array = np.empty((len(numbers), 3), np.int32)
    array[:, 0], array[:, 1], array[:, 2] = kind.index, stage, numbers
    return array


def pack(actions: Iterable[Action] | ActionArray | Row) -> ActionArray:
    """The actions as an array. Raises ConfigError for an array of anything else."""
    if isinstance(actions, Row):
        return actions.array
    if isinstance(actions, np.ndarray):
        return _checked(actions)
    numbers = [(action.kind.index, action.stage, action.microbatch) for action in actions]
    try:
        return np.array(numbers, np.int32).reshape(-1, 3)
    except OverflowError:
        largest = max(max(abs(stage), abs(number)) for _, stage, number in numbers)
        raise ConfigError(f"expected stages and microbatches below 2^31; got {largest}") from None


def _checked(array: npt.NDArray[Any]) -> ActionArray:
    # The core reads kinds as places in a table.
    if array.dtype != np.int32 or array.ndim != 2 or array.shape[1] != 3:
        raise ConfigError(
            f"expected actions as int32 of shape (actions, 3); got {array.dtype} of {array.shape}"
        )
    if len(array) and not 0 <= array[:, 0].min() <= array[:, 0].max() < len(KINDS):
        raise ConfigError(
            f"expected kinds 0 to {len(KINDS) - 1}; got {array[:, 0].min()} to {array[:, 0].max()}"
        )
    return array


class Row(Sequence[Action]):
    """The actions of one rank in order; equal to any sequence of equal actions."""

    __slots__ = ("array",)

    def __init__(self, array: ActionArray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...
    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        if isinstance(index, slice):
            return tuple(Row(self.array[index]))
        kind, stage, microbatch = self.array[index].tolist()
        return Action(KINDS[kind], stage, microbatch)

    def __iter__(self) -> Iterator[Action]:
        kinds, stages, microbatches = self.array.T.tolist() if len(self.array) else ((), (), ())
        return map(Action, map(KINDS.__getitem__, kinds), stages, microbatches)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Row):
            return np.array_equal(self.array, other.array)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"Row({' '.join(map(str, self[:8]))}{' ...' * (len(self) > 8)})"


class Ranks(Sequence[Row]):
    """A row per rank: `actions[offsets[r]:offsets[r + 1]]` are those of rank r.

    Both arrays are read-only and contiguous: `actions` as ActionArray, `offsets` int64.
    """

    __slots__ = ("actions", "offsets")

    def __init__(self, actions: ActionArray, offsets: npt.NDArray[np.int64]) -> None:
        self.actions = np.ascontiguousarray(actions, np.int32).reshape(-1, 3)
        self.offsets = np.ascontiguousarray(offsets, np.int64)
        self.actions.flags.writeable = self.offsets.flags.writeable = False

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action] | ActionArray | Row]) -> Ranks:
        """The rows packed, one after the other."""
        if isinstance(rows, Ranks):
            return rows
        arrays = [pack(row) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([np.empty((0, 3), np.int32), *arrays]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        rank = range(len(self))[index]
        return Row(self.actions[self.offsets[rank] : self.offsets[rank + 1]])

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """The "kind" indices, "stage" or "microbatch" numbers of all actions."""
        return self.actions[:, ("kind", "stage", "microbatch").index(name)]

    def place_of(self, index: int) -> tuple[int, int]:
        """Rank and position in its row of the action at `index` of `actions`."""
        rank = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return rank, index - int(self.offsets[rank])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ranks):
            same = np.array_equal(self.offsets, other.offsets)
            return same and np.array_equal(self.actions, other.actions)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.actions.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, (self.actions, self.offsets)

    def __repr__(self) -> str:
        return f"Ranks({len(self)} ranks, {len(self.actions)} actions)"
