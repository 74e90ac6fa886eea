"""Cases of pipelines with several stages on a rank, compared with the unsplit model.

A case is a function of (rank, size), as in pipeline_cases.py; each rank holds two stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pipecomm.engine.pipeline import Pipeline
from pipecomm.links.limits import FlowLimits
from pipecomm.schedule import Action, Kind, Placement, Schedule
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    Batch,
    batch,
    linear_stages,
    mse,
    reference_loss,
    relative_error,
    rows,
)
from tests.engine.pipeline_error_cases import FailsBackward, Outcome, RaisesAt, outcome_of
from tests.engine.pipeline_modules import AddPosition, AddResidual, Fork, PassResidual

# Rows that do not divide evenly, of another number in the second step.
UNEVEN = [(37, 1), (41, 3)]


def looped(rank: int, size: int) -> tuple[int, ...]:
    return Placement.looped(2 * size, size).stages_of(rank)


def opened(rank: int, size: int, stages: Sequence[nn.Module], **options: Any) -> Pipeline:
    """The pipeline of `stages`, two on each rank, in the order of the schedule's placement."""
    settings: dict[str, Any] = {"schedule": "interleaved", "num_microbatches": 2 * size}
    settings |= {"loss_fn": mse, "timeout_s": TIMEOUT_S, **options}
    own = looped(rank, size)
    if isinstance(settings["schedule"], Schedule):
        own = settings["schedule"].placement.stages_of(rank)
    return Pipeline([stages[index] for index in own], **settings)


def gradient_error(
    rank: int, size: int, stages: Sequence[nn.Module], given: Sequence[Batch], **options: Any
) -> float:
    """Largest relative difference of gradients and loss from the unsplit model, over all steps."""
    expected = copy.deepcopy(list(stages))
    worst = 0.0
    with opened(rank, size, stages, **options) as pipeline:
        for one in given:
            for stage in (*stages, *expected):
                stage.zero_grad(set_to_none=True)
            loss = pipeline.train_step(one.inputs, one.targets, kwargs=one.kwargs).loss
            reference = reference_loss(expected, one, mse)
            reference.backward()
            for index in pipeline.stage_indices:
                pairs = zip(stages[index].parameters(), expected[index].parameters(), strict=True)
                worst = max(worst, 0.0, *(relative_error(p.grad, e.grad) for p, e in pairs))
            has_last = pipeline.num_stages - 1 in pipeline.stage_indices
            assert (loss is not None) == has_last
            if loss is not None:
                worst = max(worst, abs(loss - reference.item()) / abs(reference.item()))
    return worst


def uneven_rows(rank: int, size: int) -> float:
    given = [batch(num_rows, seed=seed) for num_rows, seed in UNEVEN]
    return gradient_error(rank, size, linear_stages(2 * size), given)


def coded(rank: int, size: int) -> float:
    given = [batch(8 * size, shape=(32, WIDTH))]
    options = {"codec": "int8", "grad_codec": "int8"}
    return gradient_error(rank, size, linear_stages(2 * size), given, **options)


def without_eager_sends(rank: int, size: int) -> float:
    limits = FlowLimits(strict=True)
    return gradient_error(rank, size, linear_stages(2 * size), [batch(8 * size)], limits=limits)


def looped_bfs(rank: int, size: int) -> float:
    """Backwards in the opposite order of microbatches, also where sends wait for their receives."""
    given = [batch(num_rows, seed=seed) for num_rows, seed in UNEVEN]
    stages = linear_stages(2 * size)
    return max(
        gradient_error(rank, size, stages, given, schedule="looped-bfs", limits=limits)
        for limits in (None, FlowLimits(strict=True))
    )


def frozen_chunks(rank: int, size: int) -> dict[str, float]:
    """By what is frozen: the first stages, one in the middle on this side of the loop or that."""
    found = {}
    for name, which in {
        "first round": range(size),
        "middle": [size],
        "last": [2 * size - 1],
    }.items():
        stages = linear_stages(2 * size)
        for index in which:
            stages[index].requires_grad_(False)
        found[name] = gradient_error(rank, size, stages, [batch(8 * size)] * 2)
    return found


def several_tensors(rank: int, size: int) -> float:
    torch.manual_seed(0)
    middle = [PassResidual() for _ in range(2 * size - 2)]
    return gradient_error(rank, size, [Fork(), *middle, AddResidual()], [batch(8 * size)])


def keywords_on_every_stage(rank: int, size: int) -> float:
    torch.manual_seed(0)
    given = batch(8 * size)
    given.kwargs["pos"] = torch.arange(8 * size).reshape(-1, 1) % 64
    return gradient_error(rank, size, [AddPosition() for _ in range(2 * size)], [given])


def v_shaped(rank: int, size: int) -> dict[str, Any]:
    """The loss on the rank of the inputs; the middle of the V in the memory of one rank."""
    placement, numbers = Placement.v_shaped(2 * size, size), range(2 * size)
    lists = []
    for holder in range(size):
        down, up = placement.stages_of(holder)
        order = [(Kind.F, down), (Kind.F, up), (Kind.B, up), (Kind.B, down)]
        lists.append([Action(kind, stage, m) for kind, stage in order for m in numbers])
    schedule = Schedule.from_lists("v", lists)
    given = [batch(num_rows, seed=seed) for num_rows, seed in UNEVEN]
    stages = linear_stages(2 * size)
    return {
        "error": gradient_error(rank, size, stages, given, schedule=schedule),
        "evaluation": _evaluation(rank, size, schedule=schedule),
        "codecs": _codecs(rank, size, schedule),
    }


def _codecs(rank: int, size: int, schedule: Schedule) -> dict[str, str]:
    with opened(rank, size, linear_stages(2 * size), schedule=schedule, codec="int4") as pipeline:
        return pipeline.codecs


def evaluation(rank: int, size: int) -> float:
    return _evaluation(rank, size)


def _evaluation(rank: int, size: int, **options: Any) -> float:
    """Largest difference of the loss and outputs of eval_step, of numbers no training has."""
    stages, worst = linear_stages(2 * size), 0.0
    given = batch(23)
    with torch.no_grad():
        expected = nn.Sequential(*stages)(given.inputs)
    with opened(rank, size, stages, **options) as pipeline:
        for number in (1, 3, 4 * size + 1):
            result = pipeline.eval_step(
                given.inputs, given.targets, num_microbatches=number, return_outputs=True
            )
            if result.loss is not None and result.outputs is not None:
                worst = max(worst, abs(result.loss - mse(expected, given.targets).item()))
                worst = max(worst, relative_error(torch.cat(result.outputs), expected))
    assert all(p.grad is None for stage in stages for p in stage.parameters())
    return worst


def second_chunk_raises(rank: int, size: int) -> dict[str, Outcome]:
    """Stage `size` is the second of rank 0; a step after the error works again."""
    found = {}
    given = batch(8 * size)
    for name, odd in {"F": RaisesAt(2, ValueError("boom")), "B": FailsBackward()}.items():
        stages: list[nn.Module] = linear_stages(2 * size)
        stages[size] = odd
        with opened(rank, size, stages) as pipeline:

            def step(pipeline: Pipeline = pipeline) -> None:
                pipeline.train_step(given.inputs, given.targets)

            found[name] = outcome_of(step)
            if name == "F":
                step()
    return found


def clipping(rank: int, size: int) -> float:
    stages = linear_stages(2 * size)
    expected, given = copy.deepcopy(stages), batch(8 * size)
    with opened(rank, size, stages) as pipeline:
        pipeline.train_step(given.inputs, given.targets)
        norm = pipeline.clip_grad_norm_(1e-3)
        own = [p for index in pipeline.stage_indices for p in stages[index].parameters()]
    reference_loss(expected, given, mse).backward()
    wanted = [p for stage in expected for p in stage.parameters()]
    expected_norm = nn.utils.clip_grad_norm_(wanted, 1e-3).item()
    expected_own = [p for index in looped(rank, size) for p in expected[index].parameters()]
    errors = [relative_error(p.grad, e.grad) for p, e in zip(own, expected_own, strict=True)]
    return max(abs(norm - expected_norm) / expected_norm, *errors)


def other_numbers_of_chunks(rank: int, size: int) -> Outcome:
    chunks = [nn.Identity()] * (3 if rank == 1 else 2)
    return outcome_of(
        lambda: Pipeline(
            chunks, schedule="interleaved", num_microbatches=2 * size, timeout_s=TIMEOUT_S
        )
    )


def wrapped_chunks(rank: int, size: int) -> dict[str, Any]:
    """Two replicas of a pipeline over half of the ranks; each chunk in DDP."""
    half = size // 2
    pipelines = [dist.new_group(range(first, first + half)) for first in (0, half)]
    replicas = [dist.new_group([place, place + half]) for place in range(half)]
    replica, place = divmod(rank, half)
    stages = linear_stages(2 * half)
    expected = copy.deepcopy(stages)
    reduced: list[int] = []

    # With the annotations of the hook it calls, which DDP looks at.
    @functools.wraps(allreduce_hook)
    def counting(stage: int, bucket: dist.GradBucket) -> Any:
        reduced.append(stage)
        return allreduce_hook(replicas[place], bucket)

    for index in looped(place, half):
        wrapped = DistributedDataParallel(stages[index], process_group=replicas[place])
        wrapped.register_comm_hook(index, counting)
        stages[index] = wrapped
    halves = [batch(8 * half, seed=seed) for seed in (1, 5)]
    own = halves[replica]
    with opened(place, half, stages, process_group=pipelines[replica]) as pipeline:
        for _ in range(2):
            for stage in stages:
                stage.zero_grad(set_to_none=True)
            pipeline.train_step(own.inputs, own.targets)
    for given in halves:
        (reference_loss(expected, given, mse) / 2).backward()
    errors = [
        relative_error(p.grad, e.grad)
        for index in looped(place, half)
        for p, e in zip(stages[index].parameters(), expected[index].parameters(), strict=True)
    ]
    return {"error": max(errors), "reduced": sorted(reduced), "stages": looped(place, half)}


def handed_over_in_memory(rank: int, size: int) -> bool:
    """Whether stage 1 of a rank that has both got the memory that stage 0 returned."""
    pointers: dict[str, list[int]] = {"made": [], "taken": []}

    class Watch(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.kind = kind

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x)
            pointers["taken" if self.kind == "second" else "made"].append(
                (x if self.kind == "second" else made).data_ptr()
            )
            return made

    texts = ["0F0 1F0 1B0 0B0", "2F0 3F0 3B0 2B0"]
    schedule = Schedule.from_lists("pairs", [map(Action.parse, text.split()) for text in texts])
    own = [Watch("first"), Watch("second")]
    with Pipeline(own, schedule=schedule, loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.train_step(rows(4), rows(4))
    has_gradients = all(p.grad is not None for stage in own for p in stage.parameters())
    return has_gradients and pointers["made"] == pointers["taken"] != []


CASES = {
    2: (
        uneven_rows,
        coded,
        without_eager_sends,
        looped_bfs,
        frozen_chunks,
        several_tensors,
        keywords_on_every_stage,
        v_shaped,
        evaluation,
        second_chunk_raises,
        clipping,
        other_numbers_of_chunks,
        handed_over_in_memory,
    ),
    4: (uneven_rows, coded, without_eager_sends, looped_bfs, v_shaped, evaluation, wrapped_chunks),
}
