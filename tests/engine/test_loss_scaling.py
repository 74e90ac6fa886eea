"""The recipe for loss scaling in docs/engine.md, beside a GradScaler on the unsplit model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from pipecomm.engine.pipeline import Pipeline
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    linear_stages,
    mse,
    relative_error,
    results_of,
    rows,
    run_cases,
)
from tests.ranks import spawn_ranks

SIZE = 3
NUM_STEPS = 4
OVERFLOW_STEP = 1
# Never grows in so few steps.
INITIAL_SCALE = 2.0**10


def overflow(stage: nn.Module) -> None:
    """As a backward pass in float16 may leave it."""
    next(stage.parameters()).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]


def unsplit(stages: list[nn.Module]) -> tuple[nn.Module, list[float], list[float]]:
    """The trained model, its losses, and the scale after each step."""
    whole = copy.deepcopy(nn.Sequential(*stages))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
    losses, scales = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = mse(whole(rows(6, seed=step)), rows(6, seed=step + 50))
        scaler.scale(loss).backward()
        if step == OVERFLOW_STEP:
            overflow(whole[1])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return whole, losses, scales


def recipe(rank: int, size: int) -> dict[str, Any]:
    stages = linear_stages(size)
    whole, losses, scales = unsplit(stages)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=INITIAL_SCALE)
    found: dict[str, Any] = {"losses": [], "scales": [], "expected": (losses, scales)}
    with Pipeline(stages[rank], loss_fn=mse, num_microbatches=3, timeout_s=TIMEOUT_S) as pipeline:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            scale = scaler.scale(torch.ones(()))
            result = pipeline.train_step(
                rows(6, seed=step), rows(6, seed=step + 50), loss_divisor=1 / scale
            )
            if step == OVERFLOW_STEP and rank == 1:
                overflow(stages[rank])
            scaler.unscale_(optimizer)
            pipeline.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            found["losses"].append(None if result.loss is None else result.loss / scale.item())
            found["scales"].append(scaler.get_scale())
    pairs = zip(stages[rank].parameters(), whole[rank].parameters(), strict=True)
    found["error"] = max(relative_error(p.detach(), e.detach()) for p, e in pairs)
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(SIZE, run_cases, (recipe,))


def test_every_rank_trains_as_the_unsplit_model(by_rank: Any) -> None:
    for found in results_of(by_rank, recipe):
        assert found["error"] < 1e-4


def test_overflow_on_one_stage_lowers_the_scale_on_all(by_rank: Any) -> None:
    for found in results_of(by_rank, recipe):
        assert found["scales"] == found["expected"][1]
        assert found["scales"][OVERFLOW_STEP] == INITIAL_SCALE / 2


def test_loss_over_the_scale_is_that_of_the_unsplit_model(by_rank: Any) -> None:
    *others, last = results_of(by_rank, recipe)
    assert last["losses"] == pytest.approx(last["expected"][0], rel=1e-5)
    assert all(found["losses"] == [None] * NUM_STEPS for found in others)
