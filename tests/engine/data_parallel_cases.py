"""Cases of wrapped stages: each gives relative errors by name, or counts of collectives."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from pipecomm.engine.pipeline import Pipeline
from pipecomm.schedule import build
from tests.engine.data_parallel_trial import (
    WRAPS,
    Branches,
    Recomputed,
    Trial,
    Wrap,
    as_ddp,
    as_ddp_finding_unused,
    as_replicate,
    as_replicate_by_ddp,
    as_shards,
    as_shards_within_shards,
    find_member,
    partly_frozen,
    stages_of,
    two_layers,
    whole,
    with_layers_as_ddp,
    with_layers_as_shards,
)
from tests.engine.pipeline_cases import TIMEOUT_S, WIDTH, mse, relative_error, rows

SIZE = 4


@contextlib.contextmanager
def not_reducing(module: nn.Module) -> Iterator[None]:
    """What a user does to accumulate gradients over steps."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
        return
    assert isinstance(module, FSDPModule) or hasattr(module, "set_requires_gradient_sync")
    module.set_requires_gradient_sync(False)
    yield
    module.set_requires_gradient_sync(True)


def steps_of_every_kind(rank: int, size: int) -> dict[str, float]:
    """The worst error of three steps, by wrapper, schedule and number of microbatches."""
    member, found = find_member(rank), {}
    for wrap in WRAPS:
        for schedule, number in (("1f1b", 4), ("gpipe", 3), ("1f1b", 1)):
            trial = Trial(member, wrap, schedule=schedule, num_microbatches=number)
            errors = [trial.step_error(seed) for seed in (1, 2, 3)]
            found[f"{wrap.__name__} {schedule} {number}"] = max(errors)
            trial.pipeline.close()
    return found


def steps_with_split_backwards(rank: int, size: int) -> dict[str, float]:
    """As above; weights wait, or with whole backwards alone where wrappers cannot let them."""
    member, found = find_member(rank), {}
    for wrap in WRAPS:
        trial = Trial(member, wrap, schedule=build("zb-h1", 2, 3), num_microbatches=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[wrap.__name__] = max(trial.step_error(seed) for seed in (1, 2))
        trial.pipeline.close()
    return found


def frozen_parameters(rank: int, size: int) -> dict[str, float]:
    member, found = find_member(rank), {}
    for wrap in (as_ddp, as_ddp_finding_unused, as_shards, as_replicate):
        trial = Trial(member, wrap, kind=partly_frozen)
        found[wrap.__name__] = max(trial.step_error(seed) for seed in (1, 2))
    return found


def recomputed_stages(rank: int, size: int) -> dict[str, float]:
    member, found = find_member(rank), {}
    for wrap in (as_ddp, as_ddp_finding_unused, as_shards, as_replicate):
        trial = Trial(member, wrap, kind=Recomputed)
        found[wrap.__name__] = max(trial.step_error(seed) for seed in (1, 2))
    return found


def marked_rows(microbatches: list[int], num_rows: int) -> Tensor:
    """[2 * num_rows]: whether a row belongs to one of these microbatches of its replica."""
    mark = torch.zeros(num_rows, dtype=torch.bool)
    for microbatch in microbatches:
        mark.tensor_split(4)[microbatch].fill_(True)
    return mark.repeat(2)


class UnsplitBranches(nn.Module):
    """Branches, row by row: what its microbatches are in one batch."""

    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        branch = torch.where(marked[:, None], self.branches.marked(x), x) if marked.any() else x
        return self.branches.always(branch).tanh()


def parameters_that_some_microbatches_use(rank: int, size: int) -> dict[str, float]:
    """The marked layer is used by the first, by the last, by two microbatches of a step."""
    member, found = find_member(rank), {}
    for wrap in (
        as_ddp,
        as_ddp_finding_unused,
        with_layers_as_ddp,
        as_shards,
        as_replicate,
        with_layers_as_shards,
    ):
        trial = Trial(member, wrap, kind=Branches, num_rows=8)
        trial.expected = [UnsplitBranches(stage) for stage in trial.expected]  # type: ignore[arg-type]
        found[wrap.__name__] = max(
            trial.step_error(seed, marked=marked_rows(which, 8))
            for seed, which in enumerate(([0], [3], [1, 2]))
        )
    return found


def parameters_that_a_step_does_not_use(rank: int, size: int) -> dict[str, float]:
    """The marked layer is used by one step, not by the next, and by the one after it."""
    member, found = find_member(rank), {}
    for wrap in (as_ddp_finding_unused, with_layers_as_ddp, as_shards, with_layers_as_shards):
        trial = Trial(member, wrap, kind=Branches, num_rows=8)
        trial.expected = [UnsplitBranches(stage) for stage in trial.expected]  # type: ignore[arg-type]
        found[wrap.__name__] = max(
            trial.step_error(seed, marked=marked_rows(which, 8))
            for seed, which in enumerate(([1], [], [0, 2], [3]))
        )
    return found


def parameters_that_ddp_waits_for_in_vain(rank: int, size: int) -> dict[str, Any]:
    """What a step raises that does not use a layer, and the error of the next one, which does."""
    trial = Trial(find_member(rank), as_ddp, kind=Branches, num_rows=8)
    trial.expected = [UnsplitBranches(stage) for stage in trial.expected]  # type: ignore[arg-type]
    raised = ""
    try:
        trial.train(1, marked=marked_rows([], 8))
    except RuntimeError as error:
        raised = str(error)
    trial.clear()
    return {"raised": raised, "error": trial.step_error(2, marked=marked_rows([0], 8))}


def accumulation_over_steps(rank: int, size: int) -> dict[str, Any]:
    """Errors of two rounds of three steps of which only the last reduces."""
    member, found = find_member(rank), {}
    for wrap in (as_ddp, as_replicate_by_ddp, as_replicate, as_shards):
        trial, errors = Trial(member, wrap), []
        for first in (1, 4):
            with not_reducing(trial.stage):
                trial.train(first)
                trial.train(first + 1)
            trial.train(first + 2)
            for seed in range(first, first + 3):
                trial.train_unsplit(seed)
            errors.append(trial.error())
            trial.update()
        found[wrap.__name__] = max(errors)
    return found


def evaluation_in_between(rank: int, size: int) -> dict[str, float]:
    member, found = find_member(rank), {}
    for wrap in (as_ddp, as_ddp_finding_unused, as_replicate_by_ddp, as_shards_within_shards):
        trial, errors = Trial(member, wrap), []
        for seed in (1, 2):
            errors.append(trial.step_error(seed))
            inputs, targets = trial.given(seed)
            trial.pipeline.eval_step(trial.mine(inputs), trial.mine(targets), num_microbatches=2)
        found[wrap.__name__] = max(errors)
    return found


class Normalized(nn.Module):
    """Has buffers that differ between replicas, as they see different rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


def broadcasts_of_buffers(rank: int, size: int) -> int:
    """Of the third step, after what is done but once."""
    trial = Trial(find_member(rank), as_ddp, kind=Normalized, num_rows=8)
    trial.train(1)
    trial.train(2)
    with profile() as seen:
        trial.train(3)
    return _count(seen, "broadcast")


def _count(seen: profile, word: str) -> int:
    return sum(event.name.startswith("c10d::") and word in event.name for event in seen.events())


# What a step has of each: per parameter group one, and for DDP the map of used parameters.
COLLECTIVES: dict[tuple[Wrap, str], int] = {
    (as_ddp, "allreduce"): 1,
    (as_ddp_finding_unused, "allreduce"): 2,
    (as_replicate_by_ddp, "allreduce"): 1,
    (as_replicate, "allreduce"): 1,
    (as_shards, "reduce_scatter"): 1,
    (as_shards, "allgather"): 1,
    (with_layers_as_shards, "reduce_scatter"): 2,
    (with_layers_as_shards, "allgather"): 2,
}


def collectives_of_a_step(rank: int, size: int) -> dict[str, int]:
    """Of the third step, after what is done but once; with whole backwards and with split ones."""
    member, found, late = find_member(rank), {}, build("zb-h1", 2, 4)
    runs = [(wrap, word, "1f1b", "") for wrap, word in COLLECTIVES]
    runs += [(wrap, "allreduce", late, " split") for wrap in (as_ddp, as_ddp_finding_unused)]
    for wrap, word, schedule, name in runs:
        trial = Trial(member, wrap, schedule=schedule)
        for seed in (1, 2):
            trial.step_error(seed)
        with profile() as seen:
            trial.train(3)
        found[f"{wrap.__name__} {word}{name}"] = _count(seen, word)
    return found


def hybrid_shards(rank: int, size: int) -> dict[str, float]:
    """Four pipelines of one stage, over a mesh of replicas and shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    stage = two_layers()
    expected = copy.deepcopy(stage)
    fully_shard(stage, mesh=mesh)
    inputs, targets, errors = rows(4 * 7), rows(4 * 7, seed=2), []
    with Pipeline(
        stage,
        num_microbatches=4,
        loss_fn=mse,
        process_group=[dist.new_group([r]) for r in range(size)][rank],
    ) as pipeline:
        for _ in range(2):
            stage.zero_grad()
            expected.zero_grad()
            pipeline.train_step(inputs.chunk(4)[rank], targets.chunk(4)[rank])
            mse(expected(inputs), targets).backward()
            pairs = zip(stage.parameters(), expected.parameters(), strict=True)
            errors += [relative_error(whole(p.grad), e.grad) for p, e in pairs]
    return {"hybrid": max(errors)}


class Narrow(nn.Module):
    """Has parameters of one row, which leave a shard of two empty."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 1)
        self.up = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).tanh())


NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def clipped(rank: int, size: int) -> dict[str, float]:
    """The relative error of a norm, or of the gradients it has scaled if that is larger."""
    member, found = find_member(rank), {}
    for wrap in (as_ddp, as_replicate, as_shards, as_shards_within_shards):
        for kind in (two_layers, Narrow):
            trial = Trial(member, wrap, kind=kind)
            for norm_type in NORM_TYPES:
                trial.train(1)
                trial.train_unsplit(1)
                norm = trial.pipeline.clip_grad_norm_(1e-3, norm_type)
                parameters = [p for stage in trial.expected for p in stage.parameters()]
                expected = nn.utils.clip_grad_norm_(parameters, 1e-3, norm_type).item()
                key = f"{wrap.__name__} {kind.__name__} {norm_type}"
                found[key] = max(abs(norm / expected - 1), trial.error())
                trial.clear()
    return found


def clipped_tensor_parallel(rank: int, size: int) -> dict[str, float]:
    """Of one column-wise and one row-wise layer, over the ranks of a stage."""
    member, found = find_member(rank), {}
    stages = stages_of(two_layers)
    expected = copy.deepcopy(stages)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    stage = parallelize_module(stages[member.stage], member.mesh, plan)
    inputs, targets = rows(8), rows(8, seed=2)
    with Pipeline(
        stage, num_microbatches=2, loss_fn=mse, process_group=member.pipeline, timeout_s=TIMEOUT_S
    ) as pipeline:
        pipeline.train_step(inputs, targets)
        mse(nn.Sequential(*expected)(inputs), targets).backward()
        for norm_type in NORM_TYPES:
            norm = pipeline.clip_grad_norm_(math.inf, norm_type)
            parameters = [p for stage in expected for p in stage.parameters()]
            reference = nn.utils.clip_grad_norm_(parameters, math.inf, norm_type).item()
            found[f"tensor parallel {norm_type}"] = abs(norm / reference - 1)
    return found


class Fails(torch.autograd.Function):
    """The same value; its backward raises while `armed` says so."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Fails.armed:
            raise ArithmeticError("as told")
        return gradients[0]


class FailsWhenTold(nn.Module):
    """`moment` "forward" raises in a forward, "backward" amid a backward; None does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.moment: str | None = None
        self.microbatch = 0
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        is_due = self.num_forwards % 4 == self.microbatch
        self.num_forwards += 1
        x = Fails.apply(self.first(x).tanh())
        if self.moment == "forward" and is_due:
            raise ArithmeticError("as told")
        Fails.armed = self.moment == "backward" and is_due
        return self.second(x).tanh()


def a_failed_step_then_good_ones(rank: int, size: int) -> dict[str, float]:
    """The worst error of two steps after one that failed in the same way in both pipelines."""
    member, found = find_member(rank), {}
    moments = [("forward", 1), ("forward", 3), ("backward", 0), ("backward", 3)]
    for wrap in (as_ddp, as_ddp_finding_unused, as_replicate_by_ddp, as_replicate, as_shards):
        for moment, microbatch in moments:
            trial = Trial(member, wrap, kind=FailsWhenTold, num_rows=8)
            inner = trial.expected[0]
            errors = [trial.step_error(1)]
            inner = next(m for m in trial.stage.modules() if isinstance(m, FailsWhenTold))
            inner.num_forwards = 0
            if member.stage == 1:
                inner.moment, inner.microbatch = moment, microbatch
            with contextlib.suppress(Exception):
                trial.train(2)
                errors.append(float("inf"))
            inner.moment, Fails.armed = None, False
            trial.clear()
            errors += [trial.step_error(seed) for seed in (3, 4)]
            found[f"{wrap.__name__} {moment} {microbatch}"] = max(errors)
    return found
