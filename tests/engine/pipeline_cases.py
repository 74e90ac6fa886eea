"""Pipelines over real ranks, each step compared with the same modules in one process.

A case is a function of (rank, size) that runs on every rank; a spawn runs many of them, because
starting ranks takes longer than the cases themselves.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.engine.pipeline import Pipeline
from tests.patience import patient
from tests.ranks import RankFailure, spawn_ranks

WIDTH = 16
# More than any case needs; a hang shows as LinkTimeoutError and not as a killed spawn.
TIMEOUT_S = patient(20.0)


@dataclass
class Batch:
    """What train_step is given; a list in `inputs` and `targets` holds ready microbatches."""

    inputs: Any
    targets: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_divisor: float | None = None


def run_cases(
    rank: int, size: int, store_path: str, cases: Sequence[Callable[[int, int], Any]]
) -> dict[str, Any]:
    """The result of each case by its name, or the text of what it raised."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size
    )
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case.__name__] = case(rank, size)
        except Exception:
            results[case.__name__] = traceback.format_exc()
        # A rank that failed early must not start the next case while others still need it.
        dist.barrier()
    dist.destroy_process_group()
    return results


def results_of(by_rank: Sequence[dict[str, Any]], case: Callable[..., Any]) -> list[Any]:
    """What `case` returned on each rank; fails the test with the text of what it raised."""
    found = [results[case.__name__] for results in by_rank]
    raised = [text for text in found if isinstance(text, str)]
    assert not raised, "\n".join(raised)
    return found


class CasesBySize:
    """results(size, case) -> the case's result on each rank; ranks start once per size."""

    def __init__(self, cases: Mapping[int, Sequence[Callable[[int, int], Any]]]) -> None:
        self._cases = cases
        self._found: dict[int, list[dict[str, Any]] | RankFailure] = {}

    def __call__(self, size: int, case: Callable[..., Any]) -> list[Any]:
        if size not in self._found:
            try:
                self._found[size] = spawn_ranks(size, run_cases, self._cases[size], timeout_s=120)
            except RankFailure as failure:
                self._found[size] = failure
        by_rank = self._found[size]
        if isinstance(by_rank, RankFailure):
            raise by_rank
        return results_of(by_rank, case)


def linear_stages(num_stages: int, seed: int = 0) -> list[nn.Module]:
    """`num_stages` times Linear(16, 16) and a tanh, which keeps gradients far from zero."""
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def rows(num_rows: int, *, seed: int = 1, shape: tuple[int, ...] = (WIDTH,)) -> Tensor:
    """Random float32 [num_rows, *shape]."""
    return torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(seed))


def batch(num_rows: int, *, seed: int = 1, shape: tuple[int, ...] = (WIDTH,)) -> Batch:
    return Batch(rows(num_rows, seed=seed, shape=shape), rows(num_rows, seed=seed + 1, shape=shape))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def whole_model(stages: Sequence[nn.Module], inputs: Any, kwargs: dict[str, Any]) -> Any:
    """The stages one after the other in this process."""
    value = inputs
    for stage in stages:
        value = stage(*(value if isinstance(value, (tuple, list)) else (value,)), **kwargs)
    return value


def reference_loss(
    stages: Sequence[nn.Module], given: Batch, loss_fn: Callable[[Any, Any], Tensor]
) -> Tensor:
    """The loss of the unsplit model, of a batch or of ready microbatches weighted by their rows."""
    divisor = given.loss_divisor or 1.0
    if not isinstance(given.inputs, list):
        output = whole_model(stages, given.inputs, given.kwargs)
        return loss_fn(output, given.targets) / divisor
    counts = [len(part) for part in given.inputs]
    losses = [
        loss_fn(whole_model(stages, part, given.kwargs), target) * count / sum(counts)
        for part, target, count in zip(given.inputs, given.targets, counts, strict=True)
    ]
    return torch.stack(losses).sum() / divisor


def worst_error(
    rank: int,
    stages: Sequence[nn.Module],
    batches: Sequence[Batch],
    *,
    loss_fn: Callable[[Any, Any], Tensor] = mse,
    **options: Any,
) -> float:
    """Largest relative difference from the unsplit model, over all steps, gradients and losses.

    Steps are followed by SGD on both sides, so that a step that spoils the next one shows too.
    """
    expected = copy.deepcopy(list(stages))
    parameters = list(stages[rank].parameters())
    expected_parameters = list(expected[rank].parameters())
    worst = 0.0
    with Pipeline(stages[rank], loss_fn=loss_fn, timeout_s=TIMEOUT_S, **options) as pipeline:
        for given in batches:
            for stage in (stages[rank], *expected):
                stage.zero_grad(set_to_none=True)
            result = pipeline.train_step(
                given.inputs, given.targets, kwargs=given.kwargs, loss_divisor=given.loss_divisor
            )
            loss = reference_loss(expected, given, loss_fn)
            loss.backward()
            worst = max(worst, *(_errors(parameters, expected_parameters)))
            if rank == len(stages) - 1:
                assert result.loss is not None
                worst = max(worst, abs(result.loss - loss.item()) / (abs(loss.item()) + 1e-12))
            else:
                assert result.loss is None
            _sgd([stages[rank], *expected])
    return worst


def relative_error(value: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference relative to the largest expected value; infinite if only one is None."""
    if value is None or expected is None:
        return 0.0 if value is expected else float("inf")
    return ((value - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def _errors(parameters: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    pairs = zip(parameters, expected, strict=True)
    return [0.0, *(relative_error(p.grad, e.grad) for p, e in pairs)]


def _sgd(modules: Sequence[nn.Module]) -> None:
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
