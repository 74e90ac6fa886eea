"""One gradient norm over all stages: that of the unsplit model, on every rank alike."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.grad_norm import clip_grad_norm
from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import ConfigError
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    batch,
    linear_stages,
    mse,
    relative_error,
    results_of,
    run_cases,
)
from tests.ranks import spawn_ranks

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
SIZE = 3


def alone(value: Tensor) -> list[Tensor]:
    return [value]


def parameters_with(grads: Sequence[Tensor | None]) -> list[nn.Parameter]:
    found = []
    for grad in grads:
        like = torch.zeros(2) if grad is None else grad
        parameter = nn.Parameter(torch.zeros_like(like))
        parameter.grad = grad
        found.append(parameter)
    return found


def random_grads(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 5, generator=generator).to(dtype) for n in (3, 1, 40)]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_alone_it_equals_torch(norm_type: float, max_norm: float) -> None:
    ours, theirs = parameters_with(random_grads()), parameters_with(random_grads())
    norm = clip_grad_norm(ours, max_norm, norm_type, alone)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert norm == pytest.approx(expected.item(), rel=1e-5)
    for our, their in zip(ours, theirs, strict=True):
        assert relative_error(our.grad, their.grad) < 1e-5


def test_gradients_within_the_limit_keep_their_bits() -> None:
    parameters = parameters_with(random_grads())
    clip_grad_norm(parameters, 1e6, 2.0, alone)
    assert all(
        torch.equal(parameter.grad, grad)  # type: ignore[arg-type]
        for parameter, grad in zip(parameters, random_grads(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_of_half_formats_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    for scale in (1e-4, 1e3):
        grads = [(grad.float() * scale).to(dtype) for grad in random_grads()]
        expected = torch.cat([grad.double().flatten() for grad in grads]).norm().item()
        norm = clip_grad_norm(parameters_with(grads), math.inf, 2.0, alone)
        assert norm == pytest.approx(expected, rel=1e-3)


def test_parts_of_other_stages_count() -> None:
    parameters = parameters_with([torch.tensor([3.0])])

    def with_another(value: Tensor) -> list[Tensor]:
        return [value, torch.full_like(value, 16.0)]

    assert clip_grad_norm(parameters, 2.5, 2.0, with_another) == 5.0
    assert parameters[0].grad is not None
    assert parameters[0].grad.item() == 1.5


def test_no_gradients_count_zero() -> None:
    assert clip_grad_norm(parameters_with([None]), 1.0, 2.0, alone) == 0.0
    assert clip_grad_norm([], 1.0, math.inf, alone) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_that_is_not_finite_is_told_and_scales_nothing(bad: float, norm_type: float) -> None:
    parameters = parameters_with([torch.tensor([1.0, bad]), torch.tensor([2.0])])
    norm = clip_grad_norm(parameters, 0.1, norm_type, alone)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert parameters[1].grad is not None
    assert parameters[1].grad.item() == 2.0


@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [(-1.0, 2.0), (math.nan, 2.0), ("1", 2.0), (1.0, 0.0), (1.0, -2.0), (1.0, math.nan)],
)
def test_senseless_arguments_are_refused(max_norm: Any, norm_type: Any) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        clip_grad_norm(parameters_with(random_grads()), max_norm, norm_type, alone)


def stages_with_a_loud_end() -> list[nn.Module]:
    """The middle one has no parameters, the last one's gradients are the largest."""
    stages = linear_stages(SIZE)
    stages[1] = nn.ReLU()
    with torch.no_grad():
        for parameter in stages[2].parameters():
            parameter *= 50
    return stages


def clipped_like_the_unsplit_model(rank: int, size: int) -> dict[str, Any]:
    """By norm type: the norm, the reference's, and the worst error of a clipped gradient."""
    stages, given, found = stages_with_a_loud_end(), batch(8), {}
    whole = copy.deepcopy(nn.Sequential(*stages))
    with Pipeline(stages[rank], loss_fn=mse, num_microbatches=4, timeout_s=TIMEOUT_S) as pipeline:
        for norm_type in NORM_TYPES:
            stages[rank].zero_grad()
            whole.zero_grad()
            pipeline.train_step(given.inputs, given.targets)
            mse(whole(given.inputs), given.targets).backward()
            norm = pipeline.clip_grad_norm_(0.01, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
            pairs = zip(stages[rank].parameters(), whole[rank].parameters(), strict=True)
            errors = [relative_error(ours.grad, theirs.grad) for ours, theirs in pairs]
            found[str(norm_type)] = (norm, expected.item(), max(errors, default=0.0))
    return found


def overflow_on_one_stage(rank: int, size: int) -> list[float]:
    stage = linear_stages(size)[rank]
    with Pipeline(stage, loss_fn=mse, num_microbatches=2, timeout_s=TIMEOUT_S) as pipeline:
        given, norms = batch(4), []
        for spoilt in (False, True, False):
            stage.zero_grad()
            pipeline.train_step(given.inputs, given.targets)
            if spoilt and rank == 1:
                next(iter(stage.parameters())).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
            norms.append(pipeline.clip_grad_norm_(1.0))
    return norms


def refused_on_one_rank(rank: int, size: int) -> list[str]:
    """What each rank is told, and that a step works afterwards."""
    stage, given, told = linear_stages(size)[rank], batch(4), []
    with Pipeline(stage, loss_fn=mse, num_microbatches=2, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.train_step(given.inputs, given.targets)
        try:
            pipeline.clip_grad_norm_(-1.0 if rank == 1 else 1.0)
        except ValueError as error:
            told.append(str(error))
        stage.zero_grad()
        pipeline.train_step(given.inputs, given.targets)
    return told


CASES = (clipped_like_the_unsplit_model, overflow_on_one_stage, refused_on_one_rank)


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(SIZE, run_cases, CASES)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_over_stages_it_equals_the_unsplit_model(by_rank: Any, norm_type: float) -> None:
    found = [case[str(norm_type)] for case in results_of(by_rank, clipped_like_the_unsplit_model)]
    assert len({norm for norm, _, _ in found}) == 1
    for norm, expected, worst in found:
        assert norm == pytest.approx(expected, rel=1e-5)
        assert worst < 1e-5


def test_overflow_on_one_stage_is_seen_on_every_rank(by_rank: Any) -> None:
    for first, spoilt, last in results_of(by_rank, overflow_on_one_stage):
        assert spoilt == math.inf
        assert math.isfinite(first)
        assert first == last


def test_refusal_on_one_rank_ends_the_call_on_all(by_rank: Any) -> None:
    told = results_of(by_rank, refused_on_one_rank)
    assert all(len(texts) == 1 and "max_norm of at least 0; got -1.0" in texts[0] for texts in told)
