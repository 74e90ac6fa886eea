"""Copies of one parameter on several stages: counted once, and noticed when they drift apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.shared_parameters import counted_elsewhere, fingerprint
from pipecomm.errors import ConfigError, PipecommError
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    linear_stages,
    mse,
    results_of,
    rows,
    run_cases,
)
from tests.ranks import spawn_ranks

SIZE = 3
NORM_TYPES = (1.0, 2.0, math.inf)


class Tied(nn.Module):
    """The unsplit model: its first layer's weight is its last one's, transposed."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(copy.deepcopy(stages))
        self.stages[-1][0].weight = self.stages[0][0].weight  # type: ignore[index, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def weight(stage: nn.Module) -> nn.Parameter:
    return stage[0].weight  # type: ignore[index, return-value]


def tied_stages() -> list[nn.Module]:
    """Copies of one weight on the first and the last."""
    stages = linear_stages(SIZE)
    with torch.no_grad():
        weight(stages[-1]).copy_(weight(stages[0]))
    return stages


def add_up(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """What a user does after each step, on the ranks that share it."""
    if dist.get_rank() != 1:
        dist.all_reduce(parameter.grad, group=group)


def names_of(rank: int, stage: nn.Module) -> dict[str, nn.Parameter]:
    return {} if rank == 1 else {"tied": weight(stage)}


def counted_once(rank: int, size: int) -> dict[str, Any]:
    """By norm type: (norm, that of the unsplit model, norm without naming, scaled gradient)."""
    stages, group, found = tied_stages(), dist.new_group([0, 2]), {}
    whole, stage = Tied(stages), stages[rank]
    with Pipeline(stage, loss_fn=mse, num_microbatches=2, timeout_s=TIMEOUT_S) as pipeline:
        for norm_type in NORM_TYPES:
            stage.zero_grad()
            whole.zero_grad()
            pipeline.train_step(rows(4), rows(4, seed=2))
            add_up(weight(stage), group)
            twice = pipeline.clip_grad_norm_(math.inf, norm_type)
            norm = pipeline.clip_grad_norm_(0.01, norm_type, shared=names_of(rank, stage))
            mse(whole(rows(4)), rows(4, seed=2)).backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type).item()
            same = torch.allclose(weight(stage).grad, weight(whole.stages[rank]).grad, rtol=1e-4)  # type: ignore[arg-type]
            found[str(norm_type)] = (norm, expected, twice, same)
    return found


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except PipecommError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def spoilt(rank: int, size: int) -> dict[str, tuple[str, str]]:
    """What is raised on this rank, by what is wrong, and that clipping works afterwards."""
    stages, group, found = tied_stages(), dist.new_group([0, 2]), {}
    stage = stages[rank]
    shared = names_of(rank, stage)
    with Pipeline(stage, loss_fn=mse, num_microbatches=2, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.train_step(rows(4), rows(4, seed=2))

        def clip(names: Any = shared) -> float:
            return pipeline.clip_grad_norm_(1e9, shared=names)

        found["gradients not added up"] = outcome(clip)
        add_up(weight(stage), group)
        with torch.no_grad():
            weight(stage)[3, 5] += 0.5 * (rank == 2)
        found["values"] = outcome(clip)
        with torch.no_grad():
            weight(stage)[3, 5] -= 0.5 * (rank == 2)
            weight(stage).copy_(weight(tied_stages()[0]))
        found["one name"] = outcome(lambda: clip({"only": weight(stage)} if rank == 2 else {}))
        found["another shape"] = outcome(
            lambda: clip({} if rank == 1 else {"a": (weight, bias)[rank // 2](stage)})
        )
        found["not of this stage"] = outcome(
            lambda: clip({"a": nn.Parameter(torch.ones(1))} if rank == 2 else {})
        )
        found["names on some ranks only"] = outcome(lambda: clip(None if rank == 1 else shared))
        grad = weight(stage).grad
        if rank == 2:
            weight(stage).grad = None
        found["gradient on one"] = outcome(clip)
        weight(stage).grad = grad
        with torch.no_grad():
            weight(stage).copy_(rows(WIDTH, seed=3))
        found["afterwards"] = outcome(clip)
    return found


def bias(stage: nn.Module) -> nn.Parameter:
    return stage[0].bias  # type: ignore[index, return-value]


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(SIZE, run_cases, (counted_once, spoilt))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_named_copies_count_once_and_are_scaled_on_every_stage(
    by_rank: Any, norm_type: float
) -> None:
    found = [case[str(norm_type)] for case in results_of(by_rank, counted_once)]
    assert len({norm for norm, _, _, _ in found}) == 1
    for norm, expected, twice, same in found:
        assert norm == pytest.approx(expected, rel=1e-5)
        assert same
        # The largest is the same however often it counts.
        assert (twice > 1.05 * norm) == (norm_type != math.inf)


@pytest.mark.parametrize(
    ("what", "kind", "texts"),
    [
        ("gradients not added up", "TensorError", ['"tied"', "ranks 0 and 2", "largest diff"]),
        ("values", "TensorError", ['values in the copies of "tied"', "difference of 0.5"]),
        ("one name", "ConfigError", ['"only"', "rank 2 only"]),
        ("another shape", "TensorError", ['shape in the copies of "a"', "[16, 16] and [16]"]),
        ("not of this stage", "ConfigError", ["rank 2", "'a'"]),
        ("names on some ranks only", "", ["shared"]),
        ("gradient on one", "TensorError", ['gradients in the copies of "tied"', "none on one"]),
        ("afterwards", "nothing", []),
    ],
)
def test_copies_that_differ_are_named_on_every_rank(
    by_rank: Any, what: str, kind: str, texts: list[str]
) -> None:
    for found in results_of(by_rank, spoilt):
        name, text = found[what]
        # Of its own, or of the rank that was first to say so.
        assert kind in name + text
        assert all(part in text for part in texts), text


def alone(value: Tensor) -> list[Tensor]:
    return [value]


def test_pipeline_of_one_stage_may_name_what_more_stages_would_share() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    assert counted_elsewhere({"w": layer.weight}, layer.parameters(), 0, alone) == []


def test_parameter_used_twice_in_one_stage_counts_once() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    stage = nn.Sequential(layer, nn.Tanh(), layer)
    expected = copy.deepcopy(stage)
    pipeline = Pipeline(stage, loss_fn=mse)
    pipeline.train_step(rows(4), rows(4))
    mse(expected(rows(4)), rows(4)).backward()
    assert pipeline.clip_grad_norm_(1.0) == pytest.approx(
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0).item(), rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
def test_any_single_bit_and_any_two_places_are_told_apart(dtype: torch.dtype) -> None:
    given = rows(3).to(dtype)
    swapped = given[[1, 0, 2]]
    flipped = given.clone()
    flipped.view(torch.uint8)[2, -1] ^= 1
    assert fingerprint(given) == fingerprint(given.clone())
    assert len({fingerprint(value) for value in (given, swapped, flipped)}) == 3


@pytest.mark.parametrize("wrong", [["w"], {"w": torch.ones(1)}, {1: nn.Parameter(torch.ones(1))}])
def test_what_is_no_mapping_from_names_to_own_parameters_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="shared"):
        counted_elsewhere(wrong, [], 0, alone)
