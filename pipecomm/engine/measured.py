"""What the parts of a step took, by stage and boundary: from stats to the costs of a simulation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomm.engine.stats import StepStats
from pipecomm.schedule import Action, Costs, Kind, Placement

__all__ = ["costs_of", "own_times"]

# A row of the table for each; then one for each direction of the boundaries.
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)
_DIRECTIONS = ("forward", "backward")


def own_times(stats: StepStats, placement: Placement) -> Tensor:
    """Mean seconds of this rank's actions and of the messages that it took, NaN for all others.

    float64 of shape (kinds of actions + directions, num_stages); a message is in the column of the
    stage that takes it.
    """
    samples: dict[tuple[int, int], list[float]] = {}
    for event in stats.events:
        seconds = event.end_s - event.start_s
        if event.lane == "compute":
            row = _KINDS.index(Action.parse(event.name).kind)
        elif event.lane == "recv":
            row = len(_KINDS) + _DIRECTIONS.index(event.args["direction"])
        else:
            continue
        samples.setdefault((row, event.args["stage"]), []).append(seconds)
    shape = len(_KINDS) + len(_DIRECTIONS), placement.num_stages
    times = torch.full(shape, math.nan, dtype=torch.float64)
    for place, seconds_of in samples.items():
        times[place] = statistics.fmean(seconds_of)
    return times


def costs_of(ranks: Sequence[Tensor]) -> Costs:
    """The costs of all ranks' own_times(). What nobody measured costs nothing.

    A schedule of whole backwards says nothing of their two parts, and the other way round the
    whole is their sum.
    """
    # A stage is one rank's, so no place has two numbers.
    found = torch.nan_to_num(torch.stack(list(ranks)), nan=0.0).amax(0)
    by_kind = dict(zip(_KINDS, found.tolist(), strict=False))
    forward_s, backward_s = found[len(_KINDS) :].tolist()
    has_parts = any(by_kind[Kind.I])
    whole = [
        b or i + w for b, i, w in zip(*(by_kind[k] for k in (Kind.B, Kind.I, Kind.W)), strict=True)
    ]
    return Costs(
        by_kind[Kind.F],
        whole,
        # Stage s takes activations over boundary s - 1, and gradients over boundary s.
        forward_s[1:],
        backward_s[:-1],
        backward_input_s=by_kind[Kind.I] if has_parts else None,
        backward_weight_s=by_kind[Kind.W] if has_parts else None,
        update_s=by_kind[Kind.U],
    )
