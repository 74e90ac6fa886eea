"""What a step trains, and when it refuses because it would train nothing: as the unsplit model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import StageFailedError
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    linear_stages,
    mse,
    results_of,
    rows,
    run_cases,
)
from tests.engine.pipeline_error_cases import Outcome, outcome_of
from tests.engine.pipeline_modules import frozen
from tests.ranks import spawn_ranks

SIZE = 3


class Reentrant(nn.Module):
    """Recomputed; its output requires a gradient only if its input does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


class Without(nn.Module):
    """Under `context`, as a stage that forgot to leave it."""

    def __init__(self, inner: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.inner(x)  # type: ignore[no-any-return]


class Detached(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach()  # type: ignore[no-any-return]


def changed(which: int, change: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    stages = linear_stages(SIZE)
    stages[which] = change(stages[which])
    return stages


def detached_mse(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target).detach()


Setup = tuple[list[nn.Module], Callable[[Tensor, Tensor], Tensor]]


def setups() -> dict[str, Setup]:
    stages, last = linear_stages, SIZE - 1
    return {
        "plain": (stages(SIZE), mse),
        "loss detached": (stages(SIZE), detached_mse),
        "last stage detached": (changed(last, Detached), mse),
        "last stage under no_grad": (changed(last, lambda m: Without(m, torch.no_grad)), mse),
        "all frozen": (frozen(stages(SIZE), *range(SIZE)), mse),
        "all frozen but the first": (frozen(stages(SIZE), *range(1, SIZE)), mse),
        "all frozen but the last": (frozen(stages(SIZE), *range(last)), mse),
        "middle stage detached": (changed(1, Detached), mse),
        "middle stage detached, last frozen": (frozen(changed(1, Detached), last), mse),
        "first stage recomputed": (changed(0, Reentrant), mse),
        "last stage recomputed": (changed(last, Reentrant), mse),
        "all recomputed": ([Reentrant(stage) for stage in stages(SIZE)], mse),
    }


def trained(module: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in module.parameters()]


def as_unsplit(rank: int, size: int) -> dict[str, Any]:
    """By setup: (what this rank raised or trained, what the unsplit model raised or trained)."""
    found: dict[str, Any] = {}
    inputs, targets = rows(6, shape=(WIDTH,)), rows(6, seed=2)
    for name, (stages, loss_fn) in setups().items():
        whole = copy.deepcopy(nn.Sequential(*stages))
        try:
            loss_fn(whole(inputs), targets).backward()
            expected: Any = trained(whole[rank])
        except RuntimeError as error:
            expected = error.with_traceback(None)
        with Pipeline(
            stages[rank], loss_fn=loss_fn, num_microbatches=3, timeout_s=TIMEOUT_S
        ) as pipeline:
            try:
                pipeline.train_step(inputs, targets)
                got: Any = trained(stages[rank])
            except (RuntimeError, StageFailedError) as error:
                got = (error.with_traceback(None), getattr(error, "__notes__", []))
            # A rank that has heard nothing is done; its leaving would be another error.
            dist.barrier()
        found[name] = (got, expected)
    return found


def hears_of_the_last_stage(name: str) -> bool:
    """Whether a stage waits for a gradient, and so for what the last one says."""
    stages, _ = setups()[name]
    return bool(nn.Sequential(*stages[:-1])(rows(2)).requires_grad)


def detached_in_one_microbatch(rank: int, size: int) -> Outcome:
    calls: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return detached_mse(output, target) if len(calls) == 2 else mse(output, target)

    stage = linear_stages(SIZE)[rank]
    with Pipeline(stage, loss_fn=loss_fn, num_microbatches=3, timeout_s=TIMEOUT_S) as pipeline:
        return outcome_of(lambda: pipeline.train_step(rows(6), rows(6)))


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(SIZE, run_cases, (as_unsplit, detached_in_one_microbatch))


TORCHS_TEXT = "does not require grad and does not have a grad_fn"


@pytest.mark.parametrize("name", setups())
def test_step_trains_what_the_unsplit_model_trains_or_is_refused_like_it(
    by_rank: Any, name: str
) -> None:
    for rank, found in enumerate(results_of(by_rank, as_unsplit)):
        got, expected = found[name]
        if not isinstance(expected, RuntimeError):
            assert got == expected
        elif rank == SIZE - 1 or hears_of_the_last_stage(name):
            error, notes = got
            assert TORCHS_TEXT in str(expected)
            assert TORCHS_TEXT in str(error)
            said = " ".join([str(error), *notes])
            assert f"stage {SIZE - 1} of {SIZE}, F of microbatch 0" in said
            assert type(error) is (RuntimeError if rank == SIZE - 1 else StageFailedError)


def test_some_of_the_setups_are_refused() -> None:
    """Or the test above could not tell."""
    refused = [
        name
        for name, (stages, loss_fn) in setups().items()
        if not loss_fn(nn.Sequential(*stages)(rows(2)), rows(2)).requires_grad
    ]
    assert refused == [
        "loss detached",
        "last stage detached",
        "last stage under no_grad",
        "all frozen",
        "middle stage detached, last frozen",
        "all recomputed",
    ]


def test_loss_of_one_microbatch_that_needs_no_gradient_is_named_on_every_rank(by_rank: Any) -> None:
    for outcome in results_of(by_rank, detached_in_one_microbatch):
        said = " ".join([str(outcome.error), *outcome.notes])
        assert f"stage {SIZE - 1} of {SIZE}, F of microbatch 1" in said
        assert TORCHS_TEXT in said


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_step_around_which_autograd_is_off(context: Callable[[], Any]) -> None:
    stage = nn.Linear(WIDTH, WIDTH)
    pipeline = Pipeline(stage, loss_fn=mse, num_microbatches=2)
    with context():
        if context is torch.no_grad:
            pipeline.train_step(rows(4), rows(4))
            assert trained(stage) == [True, True]
        else:
            with pytest.raises(RuntimeError, match=TORCHS_TEXT):
                pipeline.train_step(rows(4), rows(4))
