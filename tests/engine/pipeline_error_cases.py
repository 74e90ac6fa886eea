"""Cases of steps that must fail. Each gives what the step raised on this rank."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.engine.pipeline import Pipeline
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    linear_stages,
    mse,
    reference_loss,
    relative_error,
    rows,
)
from tests.engine.pipeline_cases import Batch as Data

SIZE = 3


@dataclass
class Outcome:
    """What a step raised on one rank."""

    error: BaseException
    notes: list[str]
    seconds: float


def outcome_of(step: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        step()
    except Exception as error:
        notes = list(getattr(error, "__notes__", []))
        # Without the frames it came through, which cannot travel to the parent process.
        plain = error.with_traceback(None)
        plain.__context__ = None
        return Outcome(plain, notes, time.monotonic() - start)
    raise AssertionError("expected the step to raise")


class RaisesAt(nn.Module):
    """Linear, and raises `error` in its `at`-th forward, once."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.at = at
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at + 1:
            raise self.error
        return self.linear(x)


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no way back")


class FailsBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _FailingBackward.apply(x)


class Emits(nn.Module):
    """Returns `values` in place of its input, `first` for the first microbatch only."""

    def __init__(self, usual: Any, first: Any) -> None:
        super().__init__()
        self.usual = usual
        self.first = first
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.first if self.calls == 1 else self.usual


def step_outcome(
    stage: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    kwargs: dict[str, Any] | None = None,
    num_microbatches: int = 8,
    loss_fn: Any = mse,
    timeout_s: float = TIMEOUT_S,
    schedule: str = "1f1b",
) -> Outcome:
    with Pipeline(
        stage,
        loss_fn=loss_fn,
        num_microbatches=num_microbatches,
        timeout_s=timeout_s,
        schedule=schedule,
    ) as pipeline:
        return outcome_of(lambda: pipeline.train_step(inputs, targets, kwargs=kwargs))


def stage_raises(rank: int, size: int) -> dict[Any, Outcome]:
    """By failing stage and schedule."""
    found = {}
    for where in range(size):
        for schedule in ("gpipe", "1f1b"):
            stages = linear_stages(size)
            stages[where] = RaisesAt(2, ValueError("boom"))
            found[where, schedule] = step_outcome(stages[rank], rows(8), rows(8), schedule=schedule)
    return found


def stage_raises_other_classes(rank: int, size: int) -> dict[str, Outcome]:
    errors = (TypeError("t"), KeyError("k"), RuntimeError("r"), UnicodeError("u"), StopIteration())
    found = {}
    for error in errors:
        stages = linear_stages(size)
        stages[1] = RaisesAt(0, error)
        found[type(error).__name__] = step_outcome(stages[rank], rows(8), rows(8))
    return found


def step_after_an_error_is_right(rank: int, size: int) -> float:
    stages = linear_stages(size)
    torch.manual_seed(7)
    stages[1] = RaisesAt(2, ValueError("boom"))
    expected = copy.deepcopy(stages)
    expected[1].calls = 100
    with Pipeline(stages[rank], loss_fn=mse, num_microbatches=8, timeout_s=TIMEOUT_S) as pipeline:
        outcome_of(lambda: pipeline.train_step(rows(8, seed=5), rows(8, seed=6)))
        stages[rank].zero_grad()
        pipeline.train_step(rows(8), rows(8, seed=2))
    reference_loss(expected, Data(rows(8), rows(8, seed=2)), mse).backward()
    pairs = zip(stages[rank].parameters(), expected[rank].parameters(), strict=True)
    return max(relative_error(p.grad, e.grad) for p, e in pairs)


def backward_raises(rank: int, size: int) -> Outcome:
    stages = linear_stages(size)
    stages[1] = FailsBackward()
    return step_outcome(stages[rank], rows(8), rows(8))


def loss_raises(rank: int, size: int) -> Outcome:
    return step_outcome(linear_stages(size)[rank], rows(8), torch.zeros(8, WIDTH + 1))


def keyword_rows_differ(rank: int, size: int) -> Outcome:
    kwargs = {"pos": torch.zeros(9 if rank == 0 else 8, 1)}
    stage = linear_stages(size)[rank]
    return step_outcome(stage, rows(8), rows(8), kwargs=kwargs, num_microbatches=4)


def too_few_rows(rank: int, size: int) -> Outcome:
    stage = RaisesAt(0, AssertionError("the stage ran"))
    return step_outcome(stage, rows(3), rows(3), num_microbatches=4)


def inputs_end_early(rank: int, size: int) -> tuple[Outcome, bool]:
    stage = linear_stages(size)[rank]
    inputs = iter([rows(1)] * 5) if rank == 0 else None
    targets = iter([rows(1)] * 8) if rank == size - 1 else None
    outcome = step_outcome(stage, inputs, targets)
    return outcome, all(p.grad is None for p in stage.parameters())


def targets_end_early(rank: int, size: int) -> Outcome:
    inputs = iter([rows(1)] * 8) if rank == 0 else None
    targets = iter([rows(1)] * 5) if rank == size - 1 else None
    return step_outcome(linear_stages(size)[rank], inputs, targets)


def reader_breaks(rank: int, size: int) -> Outcome:
    def broken() -> Iterator[Tensor]:
        yield rows(1)
        raise OSError("disk on fire")

    return step_outcome(linear_stages(size)[rank], broken() if rank == 0 else None, rows(8))


@dataclass
class Record:
    h: Tensor


UNTRAVELLED: dict[str, Any] = {
    "NoneType": None,
    "int": 7,
    "bool": True,
    "str": "text",
    "dict": {"h": torch.zeros(1, WIDTH)},
    "Record": Record(torch.zeros(1, WIDTH)),
    "tuple": (torch.zeros(1, WIDTH),),
}


def outputs_that_cannot_travel(rank: int, size: int) -> dict[str, Outcome]:
    """By type; None, int, ... in the first microbatch only, a tensor in the others."""
    found = {}
    for name, value in UNTRAVELLED.items():
        tensor = torch.zeros(1, WIDTH)
        stages: list[nn.Module] = linear_stages(size)
        stages[1] = Emits((tensor, tensor), (tensor, value))
        found[name] = step_outcome(stages[rank], rows(8), rows(8))
    return found


def wrong_number_of_stages(rank: int, size: int) -> Outcome:
    return outcome_of(lambda: Pipeline(nn.Identity(), num_stages=size + 1))


def settings_differ(rank: int, size: int) -> Outcome:
    number = 4 if rank == 1 else 8
    return outcome_of(lambda: Pipeline(nn.Identity(), num_microbatches=number, timeout_s=TIMEOUT_S))


def group_without_this_rank(rank: int, size: int) -> dict[str, Any]:
    """A pipeline over two of three ranks; the third is refused."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return {"raised": outcome_of(lambda: Pipeline(nn.Identity(), process_group=group)).error}
    with Pipeline(
        nn.Linear(WIDTH, WIDTH), process_group=group, loss_fn=mse, timeout_s=TIMEOUT_S
    ) as pipeline:
        loss = pipeline.train_step(rows(4), rows(4)).loss
        return {"place": (pipeline.stage_index, pipeline.num_stages), "loss": loss}


def slow_stage(rank: int, size: int) -> Outcome:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(1.5)
            return x

    stages: list[nn.Module] = linear_stages(size)
    stages[1] = Slow()
    return step_outcome(stages[rank], rows(8), rows(8), timeout_s=0.5)


CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "train_step with num_microbatches=8": lambda p: p.train_step(rows(8), rows(8)),
    "eval_step with num_microbatches=8": lambda p: p.eval_step(rows(8), rows(8)),
    "eval_step with num_microbatches=2": lambda p: p.eval_step(
        rows(8), rows(8), num_microbatches=2
    ),
    "clip_grad_norm_ with norm_type=2.0": lambda p: p.clip_grad_norm_(1.0),
    "clip_grad_norm_ with norm_type=1.0": lambda p: p.clip_grad_norm_(1.0, 1.0),
}


def calls_differ(rank: int, size: int) -> dict[tuple[str, str], BaseException | None]:
    """By what rank 1 calls and what the others call; what this rank raised, if anything."""
    found: dict[tuple[str, str], BaseException | None] = {}
    for odd, usual in itertools.permutations(CALLS, 2):
        with Pipeline(
            linear_stages(size)[rank], loss_fn=mse, num_microbatches=8, timeout_s=TIMEOUT_S
        ) as pipeline:
            try:
                CALLS[odd if rank == 1 else usual](pipeline)
                found[odd, usual] = None
            except Exception as error:
                found[odd, usual] = error.with_traceback(None)
                error.__context__ = None
        dist.barrier()
    return found


def failure_after_the_others_are_done(rank: int, size: int) -> dict[str, Any]:
    """The first stage is the last to end; its failure there reaches nobody."""
    stages: list[nn.Module] = linear_stages(size)
    if rank == 0:
        weight = next(iter(stages[0].parameters()))
        weight.register_hook(_wait_and_raise)
    found = {}
    with Pipeline(stages[rank], loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:
        try:
            pipeline.train_step(rows(8), rows(8))
            found["raised"] = False
        except ValueError:
            found["raised"] = True
        dist.barrier()
        stages[rank].zero_grad()
        found["next"] = pipeline.eval_step(rows(8), rows(8)).loss
    return found


def _wait_and_raise(gradient: Tensor) -> None:
    time.sleep(1)
    raise ValueError("late")


def step_after_close(rank: int, size: int) -> Outcome:
    pipeline = Pipeline(linear_stages(size)[rank], loss_fn=mse, timeout_s=TIMEOUT_S)
    pipeline.close()
    pipeline.close()
    return outcome_of(lambda: pipeline.train_step(rows(2), rows(2)))


CASES = {
    SIZE: (
        stage_raises,
        stage_raises_other_classes,
        step_after_an_error_is_right,
        backward_raises,
        loss_raises,
        keyword_rows_differ,
        too_few_rows,
        inputs_end_early,
        targets_end_early,
        reader_breaks,
        outputs_that_cannot_travel,
        wrong_number_of_stages,
        settings_differ,
        group_without_this_rank,
        slow_stage,
        calls_differ,
        failure_after_the_others_are_done,
        step_after_close,
    )
}
