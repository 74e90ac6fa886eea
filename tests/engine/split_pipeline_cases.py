"""Cases of pipelines with split backwards, as functions of (rank, size) (pipeline_cases.py)."""

from __future__ import annotations

import copy
import functools
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipecomm.codecs.policy import CodecPolicy
from pipecomm.engine.pipeline import Pipeline
from pipecomm.schedule import Costs, Schedule, build
from tests.engine import split_orders
from tests.engine.chunk_cases import gradient_error
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    batch,
    linear_stages,
    mse,
    rows,
    worst_error,
)
from tests.engine.pipeline_error_cases import FailsBackward, Outcome, outcome_of
from tests.engine.pipeline_modules import AddResidual, Fork, PassResidual, frozen, made

NUM_MICROBATCHES = 6
V_SHAPED = ("zb-v", "dualpipe-v")
ORDERS: dict[str, Callable[[int, int], Schedule]] = {
    "zb-h1": functools.partial(build, "zb-h1"),
    "planned": functools.partial(build, "planned", costs=Costs(1, 2, latency_s=1)),
    "weights last": split_orders.weights_last,
    "mixed": split_orders.mixed,
}


def deep_stages(num_stages: int) -> list[nn.Module]:
    """Layers that wait around one that does not."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH),
                      nn.Linear(WIDTH, WIDTH))
        for _ in range(num_stages)
    ]  # fmt: skip


def orders(rank: int, size: int) -> dict[str, float]:
    """By schedule, the error against the unsplit model."""
    given = [batch(25), batch(31, seed=4)]
    return {
        name: worst_error(rank, deep_stages(size), given, schedule=make(size, NUM_MICROBATCHES),
                          num_microbatches=NUM_MICROBATCHES)
        for name, make in ORDERS.items()
    }  # fmt: skip


def several_tensors_and_frozen(rank: int, size: int) -> dict[str, float]:
    order = build("zb-h1", size, NUM_MICROBATCHES)
    torch.manual_seed(0)
    stages = {
        "several tensors": [Fork(), *made(PassResidual, size - 2), AddResidual()],
        "first frozen": frozen(deep_stages(size), 0),
        "last frozen": frozen(deep_stages(size), size - 1),
        "without layers": [nn.Tanh(), *deep_stages(size - 1)],
    }
    return {
        name: worst_error(rank, modules, [batch(24)], schedule=order)
        for name, modules in stages.items()
    }


def v_shaped(rank: int, size: int) -> dict[str, float]:
    """By schedule of two stages on a rank, the error against the unsplit model."""
    found, given = {}, [batch(25), batch(31, seed=4)]
    for name in V_SHAPED:
        schedule = build(name, 2 * size, 2 * size, size)
        stages = deep_stages(2 * size)
        found[name] = gradient_error(rank, size, stages, given, schedule=schedule)
    return found


def from_a_file(rank: int, size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.csv"
        path.write_text("0F0,0F1,0I0,,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
        schedule = Schedule.from_csv(path)
    return worst_error(rank, deep_stages(size), [batch(5)], schedule=schedule)


def _gradients(rank: int, size: int, schedule: Any, codec: str) -> list[Tensor]:
    stage, policy = deep_stages(size)[rank], CodecPolicy(codec, min_nbytes=0)
    with Pipeline(stage, schedule=schedule, num_microbatches=NUM_MICROBATCHES, loss_fn=mse,
                  codec=policy, grad_codec=policy, timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip
        for seed in (1, 2):
            given = batch(24, seed=seed, shape=(32, WIDTH))
            pipeline.train_step(given.inputs, given.targets)
    return [p.grad for p in stage.parameters() if p.grad is not None]


def same_bits(rank: int, size: int) -> dict[str, bool]:
    """By codec and schedule, whether the gradients are those of whole backwards in 1F1B."""
    found = {}
    for codec in ("raw", "int8"):
        expected = _gradients(rank, size, "1f1b", codec)
        for name, make in ORDERS.items():
            got = _gradients(rank, size, make(size, NUM_MICROBATCHES), codec)
            same = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
            found[f"{codec}, {name}"] = all(same) and len(same) == 6
    return found


def same_bits_in_a_v(rank: int, size: int) -> bool:
    """Whether zb-v gives what whole backwards over the same placement do."""
    found = []
    for schedule in (build("zb-v", 2 * size, 6, size), split_orders.whole_v(size, 6)):
        stages = deep_stages(2 * size)
        own = [stages[index] for index in schedule.placement.stages_of(rank)]
        with Pipeline(own, schedule=schedule, loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:
            pipeline.train_step(rows(12), rows(12, seed=2))
        found.append([p.grad for stage in own for p in stage.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


class Counted(nn.Module):
    """Counts the microbatches whose activation, the input of its second layer, is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.live = self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        weakref.finalize(h.untyped_storage(), self._one_less)
        self.live += 1
        self.peak = max(self.peak, self.live)
        y: Tensor = self.second(h)
        return y

    def _one_less(self) -> None:
        self.live -= 1


def live_activations(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """By schedule: the measured peak, what it is to be, what is alive after the step."""
    found = {}
    makers = {"1f1b": functools.partial(build, "1f1b"), **ORDERS}
    for name, make in makers.items():
        schedule = make(size, NUM_MICROBATCHES)
        stage = Counted()
        with Pipeline(stage, schedule=schedule, num_microbatches=NUM_MICROBATCHES, loss_fn=mse,
                      timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip
            pipeline.train_step(rows(12), rows(12))
        found[name] = (stage.peak, schedule.peak_activations()[rank], stage.live)
    return found


class FailsOnce(nn.Module):
    """Its weight gradients fail in the second microbatch of the first step: by a hook, in W."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.layer.weight.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("boom")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def errors(rank: int, size: int) -> dict[str, Outcome]:
    """An error in I and one in W of the last rank; after the latter, a step that works."""
    found = {}
    for name, odd in {"I": FailsBackward(), "W": FailsOnce()}.items():
        stages: list[nn.Module] = linear_stages(size)
        stages[-1] = odd
        stage = stages[rank]
        before = {id(part): dict(vars(part)) for part in stage.modules()}
        with Pipeline(stage, schedule=build("zb-h1", size, NUM_MICROBATCHES),
                      loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip
            given = batch(12)

            def step(pipeline: Pipeline = pipeline, given: Any = given) -> None:
                pipeline.train_step(given.inputs, given.targets)

            found[name] = outcome_of(step)
            if name == "W":
                stage.zero_grad()
                step()
        assert all("forward" not in vars(part) for part in stage.modules())
        assert before.keys() == {id(part) for part in stage.modules()}
    return found


def evaluation_between(rank: int, size: int) -> bool:
    """Evaluation after a step that split, and the same step again: the same bits."""
    stage, schedule = deep_stages(size)[rank], build("zb-h1", size, NUM_MICROBATCHES)
    other = copy.deepcopy(stage)
    found = []
    for module, evaluates in ((stage, True), (other, False)):
        with Pipeline(module, schedule=schedule, loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:
            for _ in range(2):
                pipeline.train_step(rows(12), rows(12, seed=2))
                if evaluates:
                    pipeline.eval_step(rows(5), rows(5), num_microbatches=3)
        found.append([p.grad for p in module.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


CASES = {
    2: (
        orders,
        several_tensors_and_frozen,
        v_shaped,
        from_a_file,
        same_bits,
        same_bits_in_a_v,
        live_activations,
        errors,
        evaluation_between,
    ),
    4: (orders, v_shaped, same_bits, same_bits_in_a_v, live_activations),
}
