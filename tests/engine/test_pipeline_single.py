"""A pipeline of one stage, without another process or torch.distributed, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.plan import check_schedule
from pipecomm.errors import ConfigError
from pipecomm.links.link import LinkEmulation
from pipecomm.schedule import Action, Schedule, build
from tests.engine.pipeline_cases import (
    batch,
    linear_stages,
    mse,
    rows,
    worst_error,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_single_stage_needs_no_other_process(schedule: str, num_microbatches: int) -> None:
    assert not torch.distributed.is_initialized()
    error = worst_error(
        0, linear_stages(1), [batch(8)] * 2, schedule=schedule, num_microbatches=num_microbatches
    )
    assert error < TOLERANCE


def test_single_stage_moves_no_bytes() -> None:
    with Pipeline(linear_stages(1)[0], loss_fn=mse, num_microbatches=2) as pipeline:
        stats = pipeline.train_step(rows(4), rows(4)).stats
    assert stats.payload_nbytes_sent == stats.wire_nbytes_received == 0
    assert [event.name for event in stats.events] == ["0F0", "0B0", "0F1", "0B1"]
    assert 0 < stats.compute_s <= stats.step_s
    assert 0 <= stats.bubble < 1


def test_gradients_add_up_over_steps_as_in_pytorch() -> None:
    (stage,) = linear_stages(1)
    with Pipeline(stage, loss_fn=mse) as pipeline:
        pipeline.train_step(rows(4), rows(4))
        once = [parameter.grad.clone() for parameter in stage.parameters()]
        pipeline.train_step(rows(4), rows(4))
    for parameter, grad in zip(stage.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


def test_training_step_inside_no_grad_still_trains() -> None:
    (stage,) = linear_stages(1)
    with torch.no_grad(), Pipeline(stage, loss_fn=mse) as pipeline:
        pipeline.train_step(rows(4), rows(4))
    assert all(parameter.grad is not None for parameter in stage.parameters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": "2f2b"}, ["2f2b", "1f1b", "gpipe"]),
        ({"codec": "int5"}, ["int5"]),
        ({"grad_codec": "int5"}, ["int5"]),
        ({"num_microbatches": 0}, ["num_microbatches", "0"]),
        ({"num_stages": 2}, ["2", "1", "not initialised"]),
        ({"loss_reduction": "max"}, ["max", "mean", "sum"]),
        ({"schedule": build("1f1b", 2, 2)}, ["1 stages", "2 stages"]),
        ({"schedule": build("1f1b", 1, 2), "num_microbatches": 3}, ["2", "3"]),
    ],
)
def test_wrong_settings_are_refused_when_constructed(
    options: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        Pipeline(nn.Identity(), **options)
    assert all(text in str(raised.value) for text in named)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_schedule_that_places_other_numbers_of_stages_is_refused(num_chunks: int) -> None:
    rows_of_ranks = ["0F0 1F0 1B0 0B0", "2F0 2B0"]
    ranks = [[Action.parse(text) for text in row.split()] for row in rows_of_ranks]
    plan = Schedule.from_lists("mine", ranks)
    text = rf"2 ranks with {num_chunks} stages on rank 0, .* got 3 stages on 2 ranks, 2 of them"
    with pytest.raises(ConfigError, match=text):
        check_schedule(plan, num_chunks, 0, 2, 1)
    assert check_schedule(plan, 2, 0, 2, 1) is plan
    assert check_schedule(plan, 1, 1, 2, 1) is plan


def test_schedule_with_split_backwards_is_refused_by_name_when_constructed() -> None:
    row = [Action.parse(text) for text in ("0F0", "0I0", "0W0")]
    plan = Schedule.from_lists("zb", [row])
    plan.check()
    with pytest.raises(ConfigError, match="expected a schedule of F and B; got I, W in 'zb'"):
        Pipeline(nn.Identity(), schedule=plan)


@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf")])
def test_loss_divisor_that_cannot_divide_is_refused(divisor: float) -> None:
    with (
        Pipeline(nn.Identity(), loss_fn=mse) as pipeline,
        pytest.raises(ConfigError, match="loss_divisor"),
    ):
        pipeline.train_step(rows(2), rows(2), loss_divisor=divisor)


def test_training_without_a_loss_is_refused() -> None:
    with Pipeline(nn.Identity()) as pipeline, pytest.raises(ConfigError, match="loss_fn"):
        pipeline.train_step(rows(2), rows(2))


@pytest.mark.parametrize("loss", [torch.ones(2), 1.5, None])
def test_loss_that_is_no_scalar_tensor_is_refused(loss: Any) -> None:
    with (
        Pipeline(nn.Identity(), loss_fn=lambda output, target: loss) as pipeline,
        pytest.raises(TypeError, match="loss_fn"),
    ):
        pipeline.train_step(rows(2), rows(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": None}, "nn.Module"),
        ({"stage": lambda x: x}, "nn.Module"),
        ({"loss_fn": "mse"}, "loss_fn"),
        ({"loss_reduction": "max"}, "mean"),
        ({"schedule": None}, "schedule"),
        ({"timeout_s": 0}, "more than 0"),
        ({"timeout_s": float("nan")}, "more than 0"),
        ({"timeout_s": "5"}, "more than 0"),
    ],
)
def test_argument_of_the_wrong_kind_is_refused_at_construction(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Pipeline(**{"stage": torch.nn.Linear(2, 2), **options})


def test_step_after_close_says_that_the_pipeline_is_closed() -> None:
    pipeline = Pipeline(torch.nn.Linear(2, 2))
    pipeline.close()
    with pytest.raises(ConfigError, match="closed"):
        pipeline.eval_step(torch.ones(1, 2))


@pytest.mark.parametrize("options", [{"mbps": -1}, {"latency_ms": float("nan")}, {"mbps": "x"}])
def test_emulated_link_of_impossible_numbers_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        LinkEmulation(**options)


class _FailsInCall(nn.Module):
    """Passes its input on, times a weight; fails in its n-th call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.left = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("boom")
        return x * self.weight


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (1, "stage 0 of 1, F of microbatch 0, iteration 1"),
        (2, "stage 0 of 1, F of microbatch 0"),
        (3, "stage 0 of 1, F of microbatch 0, iteration 2"),
    ],
    ids=["first training step", "evaluation", "second training step"],
)
@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="Python 3.10 has no notes")
def test_error_names_the_iteration_of_the_user_whatever_else_ran(call: int, where: str) -> None:
    pipeline = Pipeline(_FailsInCall(call), loss_fn=mse)
    with pytest.raises(ArithmeticError) as caught:  # noqa: PT012
        pipeline.train_step(rows(4), rows(4))
        pipeline.clip_grad_norm_(1.0)
        pipeline.eval_step(rows(4), rows(4))
        pipeline.train_step(rows(4), rows(4))
    assert caught.value.__notes__ == [f"pipecomm: in {where}"]
