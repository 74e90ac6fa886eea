"""What a schedule keeps in memory: activations, from its forward until the end of the backward.

`I` lets go of what only the gradients of the inputs need; the inputs of the linear layers and the
gradients of their outputs stay until `W`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipecomm.schedule.action import KINDS, Kind
from pipecomm.schedule.data import ScheduleData

__all__ = ["peak_activations", "peak_per_rank"]

_CHANGE_IN_LIVE = np.array([kind.change_in_live for kind in KINDS])


def peak_activations(schedule: ScheduleData) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations are kept at one time.

    From the forward to the end of the backward: W, where it is split.
    """
    if not schedule.has_backward:
        return (0,) * schedule.num_stages
    peaks = [0] * schedule.num_stages
    for row in schedule.ranks:
        kinds, stages = row.array[:, 0], row.array[:, 1]
        for stage in np.unique(stages):
            live = np.cumsum(_CHANGE_IN_LIVE[kinds[stages == stage]])
            peaks[stage] = int(live.max(initial=0))
    return tuple(peaks)


def peak_per_rank(
    schedule: ScheduleData, activation: Sequence[float], held_for_weights: Sequence[float]
) -> tuple[float, ...]:
    """Per rank, the most that its activations take at one time, in the unit of `activation`.

    activation: of one microbatch, per stage, from F to the end of B or I. held_for_weights: what
    of it stays from I to W. With 1 and 1 each: the microbatches kept, all stages of a rank
    together.
    """
    if not schedule.has_backward:
        return (0.0,) * len(schedule.ranks)
    table = _changes(np.asarray(activation, float), np.asarray(held_for_weights, float))
    return tuple(
        float(np.cumsum(table[row.array[:, 0], row.array[:, 1]]).max(initial=0.0))
        for row in schedule.ranks
    )


def _changes(activation: npt.NDArray[Any], held: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """By kind and stage, what an action adds to memory."""
    table = np.zeros((len(KINDS), len(activation)))
    table[Kind.F.index], table[Kind.B.index] = activation, -activation
    table[Kind.I.index], table[Kind.W.index] = held - activation, -held
    return table
