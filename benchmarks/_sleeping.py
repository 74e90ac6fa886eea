"""Stages that sleep instead of computing, so that two cores can stand for many devices."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _harness import Timing
from torch import Tensor, nn

from pipecomm.schedule import Schedule

__all__ = [
    "NBYTES",
    "TIMES",
    "Live",
    "SleepingStage",
    "Times",
    "data",
    "measure_together",
    "stages_of",
    "use_fine_timers",
]

_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Times:
    """Seconds of forward, and of the gradients of inputs and weights, of one microbatch."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    def per_part(self, parts: int) -> Times:
        """Of a stage cut into equal parts."""
        return Times(self.forward_s / parts, self.input_s / parts, self.weight_s / parts)


# Of a rank's stages together.
TIMES = Times(20e-3, 20e-3, 20e-3)
# 256 KiB a microbatch.
ROWS, WIDTH = 4096, 16
NBYTES = 4 * ROWS * WIDTH


def use_fine_timers() -> None:
    """A sleep of this thread ends when it should: Linux adds up to 50 us if not told otherwise.

    Threads started later inherit it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Live:
    """Counts the microbatches whose activations exist, and the most at one time."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def copy_of(self, x: Tensor) -> Tensor:
        """x in memory of its own, counted until the last tensor in it is gone."""
        copy = np.empty(x.shape, np.float32)
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(copy, self._forget)
        return torch.from_numpy(copy).copy_(x)

    def _forget(self) -> None:
        self.now -= 1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        return stage.live.copy_of(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stage.end_input_gradient()
        return gradient, None


class SleepingStage(nn.Module):
    """A layer of `width` x `width` weights whose three parts take as long as `times` say.

    The layer's input is what a microbatch keeps. What the layer itself takes counts as part of its
    time, but for the late gradient of a weight, which sleeps once it has been computed.
    """

    def __init__(self, width: int, times: Times, live: Live | None = None, seed: int = 0) -> None:
        super().__init__()
        self.times = times
        self.live = live or Live()
        self._until_s = 0.0
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(width))
            self.layer.weight.add_(torch.rand(width, width, generator=generator), alpha=0.1)
        # Wherever the gradient of the weight is made, with that of the input or later.
        self.layer.weight.register_hook(self._weight_gradient)

    def forward(self, x: Tensor) -> Tensor:
        until_s = time.monotonic() + self.times.forward_s
        # On the first stage x needs no gradient, and yet its I takes time.
        x = x if x.requires_grad else x.detach().requires_grad_()
        y: Tensor = self.layer(_Sleep.apply(x, self))
        if y.requires_grad:
            y.register_hook(self._begin_backward)
        _sleep_until(until_s)
        return y

    def _begin_backward(self, gradient: Tensor) -> Tensor:
        self._until_s = time.monotonic() + self.times.input_s
        return gradient

    def _weight_gradient(self, gradient: Tensor) -> Tensor:
        if self._until_s:
            # A whole backward: autograd comes here before the gradient of the input is done.
            self._until_s += self.times.weight_s
        else:
            time.sleep(self.times.weight_s)
        return gradient

    def end_input_gradient(self) -> None:
        _sleep_until(self._until_s)
        self._until_s = 0.0


def _sleep_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.monotonic()))


def stages_of(
    schedule: Schedule, rank: int, live: Live | None = None, times: Times = TIMES
) -> list[SleepingStage]:
    """Those of a rank, which share its time."""
    own = schedule.placement.stages_of(rank)
    part = times.per_part(len(own))
    return [SleepingStage(WIDTH, part, live, seed=index) for index in own]


def data(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(9)
    rows = (num_microbatches * ROWS, WIDTH)
    return torch.rand(rows, generator=generator), torch.rand(rows, generator=generator)


def measure_together(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """As `_harness.measure`, from the first rank's start to the last one's end.

    All ranks of this host call it and begin each call together: where one may begin while another
    still ends the call before, the pipeline of two steps in a row hides what one leaves idle.
    """
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            start_s = time.monotonic()
            call()
            spans[name].append((start_s, time.monotonic()))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, spans)
    return {name: _timing([ranks[name] for ranks in found]) for name in calls}


def _timing(ranks: list[list[tuple[float, float]]]) -> Timing:
    rounds = [
        max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)
        for spans in zip(*ranks, strict=True)
    ]
    # The first warms up.
    return Timing.of(rounds[1:])
