"""schedule="auto": measured, chosen together, kept while it holds, and never with more memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.choice import ScheduleChoice
from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.record import Record
from pipecomm.engine.result import StepResult
from pipecomm.errors import ConfigError, StageFailedError
from pipecomm.links.link import LinkEmulation
from pipecomm.schedule import Schedule, build
from pipecomm.schedule.memory import peak_per_rank
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    CasesBySize,
    batch,
    linear_stages,
    mse,
    worst_error,
)

NUM_MICROBATCHES = 8


def stepped(schedule: Schedule, forward_s: float, backward_s: float, step_s: float) -> StepResult:
    """One rank has run all lists; what its actions took."""
    record = Record()
    record.step_s = step_s
    for row in schedule.ranks:
        for action in row:
            seconds = forward_s if action.kind.name == "F" else backward_s
            record.add_compute(action, 1.0, 1.0 + seconds)
    return StepResult(None, None, record)


def alone(value: Tensor) -> list[Tensor]:
    return [value]


def test_nothing_is_chosen_before_the_third_step() -> None:
    choice = ScheduleChoice(build("1f1b", 4, NUM_MICROBATCHES))
    assert [choice.is_due(iteration) for iteration in (1, 2, 3)] == [False, False, True]


def test_the_fastest_of_no_more_memory_is_taken() -> None:
    first = build("1f1b", 4, NUM_MICROBATCHES)
    choice = ScheduleChoice(first)
    choice.note(stepped(first, 1.0, 2.0, 33.0))
    chosen = choice.choose(3, alone)
    assert chosen is not None
    # Split backwards have a third of the bubble; gpipe and eager-1f1b keep more.
    assert chosen.name in ("zb-h1", "planned")
    share = [1.0] * 4
    assert max(peak_per_rank(chosen, share, share)) <= 4


def test_what_takes_as_long_as_expected_is_kept() -> None:
    first = build("1f1b", 1, NUM_MICROBATCHES)
    choice = ScheduleChoice(first)
    choice.note(stepped(first, 1.0, 2.0, 24.0))
    assert choice.choose(3, alone) is None
    assert [choice.is_due(iteration) for iteration in (4, 5)] == [False, True]
    choice.note(stepped(first, 1.0, 2.0, 24.0 * 1.09))
    assert choice.choose(5, alone) is None
    assert not choice.is_due(6)
    assert choice.is_due(5 + 100)


def test_what_takes_longer_is_chosen_again_but_not_for_ever() -> None:
    first = build("1f1b", 1, NUM_MICROBATCHES)
    choice = ScheduleChoice(first)
    looks = []
    for iteration in range(3, 30):
        choice.note(stepped(first, 1.0, 2.0, 24.0 * 2))
        if choice.is_due(iteration):
            looks.append(iteration)
            choice.choose(iteration, alone)
    assert looks == [3, 5, 7]


def test_a_step_that_failed_on_any_rank_puts_the_choice_off() -> None:
    first = build("1f1b", 1, NUM_MICROBATCHES)
    choice = ScheduleChoice(first)
    assert choice.choose(3, alone) is None
    assert choice.is_due(4)
    choice.note(stepped(first, 1.0, 2.0, 24.0))
    assert choice.choose(4, lambda value: [value, torch.full_like(value, math.nan)]) is None
    assert choice.is_due(5)


def test_ranks_that_would_choose_differently_keep_what_they_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = build("1f1b", 4, NUM_MICROBATCHES)
    choice = ScheduleChoice(first)
    choice.note(stepped(first, 1.0, 2.0, 33.0))

    def gather(value: Tensor) -> list[Tensor]:
        return [value, value + 1] if value.dtype == torch.int64 else [value]

    assert choice.choose(3, gather) is None
    assert "the ranks choose different schedules; 1f1b is kept" in caplog.text


class Slow(nn.Module):
    """Its forward takes a while, and its backward twice as long."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(5e-3)
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(_sleep_twice)
        return y


def _sleep_twice(gradient: Tensor) -> Tensor:
    time.sleep(10e-3)
    return gradient


def chosen_over_a_slow_link(rank: int, size: int) -> dict[str, Any]:
    given = batch(NUM_MICROBATCHES)
    names: list[str] = []
    losses: list[float | None] = []
    with Pipeline(
        Slow(linear_stages(size)[rank]),
        schedule="auto",
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=mse,
        timeout_s=TIMEOUT_S,
        emulation=LinkEmulation(latency_ms=20),
    ) as pipeline:
        for _ in range(3):
            losses.append(pipeline.train_step(given.inputs, given.targets).loss)
            names.append(pipeline.schedule.name)
        evaluation = pipeline.eval_step(given.inputs, given.targets).loss
    return {"names": names, "losses": losses, "evaluation": evaluation}


def gradients(rank: int, size: int) -> dict[str, float]:
    return {
        f"{number}": worst_error(
            rank,
            linear_stages(size),
            [batch(number)] * 4,
            schedule="auto",
            num_microbatches=number,
        )
        for number in (1, 3, NUM_MICROBATCHES)
    }


def one_rank_is_not_automatic(rank: int, size: int) -> list[str]:
    try:
        Pipeline(
            nn.Linear(WIDTH, WIDTH),
            schedule="auto" if rank == 0 else "1f1b",
            num_microbatches=2,
            loss_fn=mse,
            timeout_s=TIMEOUT_S,
        )
    except ConfigError as error:
        return [str(error)]
    return []


def a_step_fails_before_the_choice(rank: int, size: int) -> list[Any]:
    given = batch(4)
    stage = linear_stages(size)[rank]
    told: list[Any] = []
    with Pipeline(
        stage, schedule="auto", num_microbatches=4, loss_fn=mse, timeout_s=TIMEOUT_S
    ) as pipeline:
        for iteration in range(1, 6):
            fails = rank == size - 1 and iteration == 2
            targets = None if fails else given.targets
            try:
                pipeline.train_step(given.inputs, targets)
                told.append(pipeline.schedule.name)
            except (StageFailedError, ConfigError, TypeError, AttributeError):
                told.append("failed")
            for parameter in stage.parameters():
                parameter.grad = None
    return told


CASES: dict[int, tuple[Callable[[int, int], Any], ...]] = {
    2: (gradients, one_rank_is_not_automatic, a_step_fails_before_the_choice),
    3: (chosen_over_a_slow_link, gradients),
}


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(CASES)


def test_all_ranks_take_a_better_one_for_the_third_step(results: CasesBySize) -> None:
    found = results(3, chosen_over_a_slow_link)
    assert len({tuple(one["names"]) for one in found}) == 1
    first, second, third = found[0]["names"]
    assert first == second == "1f1b"
    assert third != "1f1b"
    first_loss, _, third_loss = found[2]["losses"]
    assert first_loss == third_loss == found[2]["evaluation"]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_the_unsplit_model(results: CasesBySize, size: int) -> None:
    for errors in results(size, gradients):
        assert all(error < 1e-5 for error in errors.values()), errors


def test_automatic_on_one_rank_alone_is_refused(results: CasesBySize) -> None:
    for told in results(2, one_rank_is_not_automatic):
        assert "schedule auto, at first 1f1b," in "".join(told)


def test_a_failed_step_does_not_part_the_ranks(results: CasesBySize) -> None:
    found = results(2, a_step_fails_before_the_choice)
    assert found[0] == found[1]
    assert found[0][1] == "failed"
    assert "failed" not in found[0][2:]
