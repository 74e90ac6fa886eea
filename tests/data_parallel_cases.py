"""Two pipelines of two stages whose stages are wrapped for data parallelism, against one model.

Ranks 0 and 1 hold stage 0, ranks 2 and 3 stage 1; 0 and 2 are one pipeline, 1 and 3 the other.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from pipecomm.pipeline import Pipeline
from tests.pipeline_cases import TIMEOUT_S, WIDTH, mse, relative_error, rows

NUM_STAGES = 2
SIZE = 4


@dataclass
class Place:
    """Where a rank stands: its stage, its replica, and the groups of both."""

    stage: int
    replica: int
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.replicas, "cpu")


Wrap = Callable[[nn.Module, Place], nn.Module]


def find_place(rank: int) -> Place:
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return Place(rank // 2, rank % 2, pipelines[rank % 2], replicas[rank // 2])


def stages_of(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(NUM_STAGES)]


def two_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()
    )


def partly_frozen() -> nn.Module:
    layers = two_layers()
    layers[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    return layers


class Branches(nn.Module):
    """Rows of one microbatch go through one of two layers, by a mark in their first column."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.marked = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        branch = self.marked(x) if bool(marked.any()) else x
        return self.always(branch).tanh()


def as_ddp(stage: nn.Module, place: Place, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(stage, process_group=place.replicas, **options)


def as_ddp_finding_unused(stage: nn.Module, place: Place) -> nn.Module:
    return as_ddp(stage, place, find_unused_parameters=True)


def as_ddp_with_bucket_views(stage: nn.Module, place: Place) -> nn.Module:
    return as_ddp(stage, place, gradient_as_bucket_view=True)


def as_ddp_reducing_float16(stage: nn.Module, place: Place) -> nn.Module:
    wrapped = as_ddp(stage, place)
    wrapped.register_comm_hook(place.replicas, fp16_compress_hook)
    return wrapped


def with_layers_as_ddp(stage: nn.Module, place: Place) -> nn.Module:
    for name, module in stage.named_children():
        if [*module.parameters()]:
            setattr(stage, name, as_ddp(module, place))
    return stage


def compiled_ddp(stage: nn.Module, place: Place) -> nn.Module:
    return torch.compile(as_ddp(stage, place), backend="eager")  # type: ignore[return-value]


def as_replicate_by_ddp(stage: nn.Module, place: Place) -> nn.Module:
    return replicate_by_ddp(stage, process_group=place.replicas)


def as_replicate(stage: nn.Module, place: Place) -> nn.Module:
    return replicate(stage, mesh=place.mesh)


def as_shards(stage: nn.Module, place: Place) -> nn.Module:
    return fully_shard(stage, mesh=place.mesh)


def as_shards_within_shards(stage: nn.Module, place: Place) -> nn.Module:
    return fully_shard(with_layers_as_shards(stage, place), mesh=place.mesh)


def with_layers_as_shards(stage: nn.Module, place: Place) -> nn.Module:
    for module in stage.children():
        if [*module.parameters()]:
            fully_shard(module, mesh=place.mesh)
    return stage


def as_shards_reduced_in_float32(stage: nn.Module, place: Place) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(stage, mesh=place.mesh, mp_policy=policy)


WRAPS: tuple[Wrap, ...] = (
    as_ddp,
    as_ddp_finding_unused,
    as_ddp_with_bucket_views,
    as_ddp_reducing_float16,
    with_layers_as_ddp,
    compiled_ddp,
    as_replicate_by_ddp,
    as_replicate,
    as_shards,
    as_shards_within_shards,
    with_layers_as_shards,
    as_shards_reduced_in_float32,
)


class Trial:
    """A wrapped stage in a pipeline, and the same stages unsplit on the batch of both replicas."""

    def __init__(
        self,
        place: Place,
        wrap: Wrap,
        *,
        kind: Callable[[], nn.Module] = two_layers,
        num_rows: int = 7,
        schedule: str = "1f1b",
        num_microbatches: int = 4,
    ) -> None:
        stages = stages_of(kind)
        self.place = place
        self.expected = copy.deepcopy(stages)
        self.stage = wrap(stages[place.stage], place)
        self.num_rows = num_rows
        self.pipeline = Pipeline(
            self.stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
            loss_fn=mse,
            process_group=place.pipeline,
            timeout_s=TIMEOUT_S,
        )

    def given(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of both replicas."""
        return rows(2 * self.num_rows, seed=seed), rows(2 * self.num_rows, seed=seed + 100)

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2)[self.place.replica]

    def train(self, seed: int, **kwargs: Tensor) -> None:
        inputs, targets = self.given(seed)
        self.pipeline.train_step(
            self.mine(inputs),
            self.mine(targets),
            kwargs={name: self.mine(value) for name, value in kwargs.items()},
        )

    def train_unsplit(self, seed: int, **kwargs: Tensor) -> None:
        value, targets = self.given(seed)
        for stage in self.expected:
            value = stage(value, **kwargs)
        mse(value, targets).backward()

    def error(self) -> float:
        """Largest relative error of a gradient; infinite where only one side has one."""
        pairs = zip(
            self.stage.parameters(), self.expected[self.place.stage].parameters(), strict=True
        )
        return max(relative_error(_whole(p.grad), e.grad) for p, e in pairs)

    def update(self) -> None:
        """One step of SGD on both sides, and gradients cleared."""
        with torch.no_grad():
            for module in (self.stage, *self.expected):
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        self.clear()

    def clear(self) -> None:
        for module in (self.stage, *self.expected):
            module.zero_grad(set_to_none=True)

    def step_error(self, seed: int, **kwargs: Tensor) -> float:
        self.train(seed, **kwargs)
        self.train_unsplit(seed, **kwargs)
        error = self.error()
        self.update()
        return error


def _whole(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


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
    place, found = find_place(rank), {}
    for wrap in WRAPS:
        for schedule, number in (("1f1b", 4), ("gpipe", 3), ("1f1b", 1)):
            trial = Trial(place, wrap, schedule=schedule, num_microbatches=number)
            errors = [trial.step_error(seed) for seed in (1, 2, 3)]
            found[f"{wrap.__name__} {schedule} {number}"] = max(errors)
            trial.pipeline.close()
    return found


def frozen_parameters(rank: int, size: int) -> dict[str, float]:
    place, found = find_place(rank), {}
    for wrap in (as_ddp, as_ddp_finding_unused, as_shards, as_replicate):
        trial = Trial(place, wrap, kind=partly_frozen)
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
        branch = torch.where(marked[:, None], self.branches.marked(x), x)
        return self.branches.always(branch).tanh()


def parameters_that_some_microbatches_use(rank: int, size: int) -> dict[str, float]:
    """The marked layer is used by the first, by the last, by two microbatches of a step."""
    place, found = find_place(rank), {}
    for wrap in (
        as_ddp,
        as_ddp_finding_unused,
        with_layers_as_ddp,
        as_shards,
        as_replicate,
        with_layers_as_shards,
    ):
        trial = Trial(place, wrap, kind=Branches, num_rows=8)
        trial.expected = [UnsplitBranches(stage) for stage in trial.expected]  # type: ignore[arg-type]
        found[wrap.__name__] = max(
            trial.step_error(seed, marked=marked_rows(which, 8))
            for seed, which in enumerate(([0], [3], [1, 2]))
        )
    return found


def accumulation_over_steps(rank: int, size: int) -> dict[str, Any]:
    """Errors of two rounds of three steps of which only the last reduces."""
    place, found = find_place(rank), {}
    for wrap in (as_ddp, as_replicate_by_ddp, as_replicate, as_shards):
        trial, errors = Trial(place, wrap), []
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
    place, found = find_place(rank), {}
    for wrap in (as_ddp, as_ddp_finding_unused, as_replicate_by_ddp, as_shards_within_shards):
        trial, errors = Trial(place, wrap), []
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
    trial = Trial(find_place(rank), as_ddp, kind=Normalized, num_rows=8)
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
    """Of the third step, after what is done but once."""
    place, found = find_place(rank), {}
    for wrap, word in COLLECTIVES:
        trial = Trial(place, wrap)
        for seed in (1, 2):
            trial.step_error(seed)
        with profile() as seen:
            trial.train(3)
        found[f"{wrap.__name__} {word}"] = _count(seen, word)
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
            errors += [relative_error(_whole(p.grad), e.grad) for p, e in pairs]
    return {"hybrid": max(errors)}


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
    place, found = find_place(rank), {}
    moments = [("forward", 1), ("forward", 3), ("backward", 0), ("backward", 3)]
    for wrap in (as_ddp, as_ddp_finding_unused, as_replicate_by_ddp, as_replicate, as_shards):
        for moment, microbatch in moments:
            trial = Trial(place, wrap, kind=FailsWhenTold, num_rows=8)
            inner = trial.expected[0]
            errors = [trial.step_error(1)]
            inner = next(m for m in trial.stage.modules() if isinstance(m, FailsWhenTold))
            inner.num_forwards = 0
            if place.stage == 1:
                inner.moment, inner.microbatch = moment, microbatch
            with contextlib.suppress(Exception):
                trial.train(2)
                errors.append(float("inf"))
            inner.moment, Fails.armed = None, False
            trial.clear()
            errors += [trial.step_error(seed) for seed in (3, 4)]
            found[f"{wrap.__name__} {moment} {microbatch}"] = max(errors)
    return found
