"""Stages wrapped for data parallelism in two pipelines of two stages, beside the unsplit model.

Ranks 0 and 1 hold stage 0, ranks 2 and 3 stage 1; 0 and 2 are one pipeline, 1 and 3 the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipecomm.engine.pipeline import Pipeline
from pipecomm.schedule import Schedule
from tests.engine.pipeline_cases import TIMEOUT_S, WIDTH, mse, relative_error, rows

NUM_STAGES = 2


@dataclass
class Member:
    """A rank: its stage, its replica, and the groups of both."""

    stage: int
    replica: int
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.replicas, "cpu")


Wrap = Callable[[nn.Module, Member], nn.Module]


def find_member(rank: int) -> Member:
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return Member(rank // 2, rank % 2, pipelines[rank % 2], replicas[rank // 2])


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


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Rows of one microbatch go through one of two layers, by a mark in their first column."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.marked = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        branch = self.marked(x) if bool(marked.any()) else x
        return self.always(branch).tanh()


def as_ddp(stage: nn.Module, member: Member, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(stage, process_group=member.replicas, **options)


def as_ddp_finding_unused(stage: nn.Module, member: Member) -> nn.Module:
    return as_ddp(stage, member, find_unused_parameters=True)


def as_ddp_with_bucket_views(stage: nn.Module, member: Member) -> nn.Module:
    return as_ddp(stage, member, gradient_as_bucket_view=True)


def as_ddp_reducing_float16(stage: nn.Module, member: Member) -> nn.Module:
    wrapped = as_ddp(stage, member)
    wrapped.register_comm_hook(member.replicas, fp16_compress_hook)
    return wrapped


def with_layers_as_ddp(stage: nn.Module, member: Member) -> nn.Module:
    for name, module in stage.named_children():
        if [*module.parameters()]:
            setattr(stage, name, as_ddp(module, member))
    return stage


def compiled_ddp(stage: nn.Module, member: Member) -> nn.Module:
    return torch.compile(as_ddp(stage, member), backend="eager")  # type: ignore[return-value]


def as_replicate_by_ddp(stage: nn.Module, member: Member) -> nn.Module:
    return replicate_by_ddp(stage, process_group=member.replicas)


def as_replicate(stage: nn.Module, member: Member) -> nn.Module:
    return replicate(stage, mesh=member.mesh)


def as_shards(stage: nn.Module, member: Member) -> nn.Module:
    return fully_shard(stage, mesh=member.mesh)


def as_shards_within_shards(stage: nn.Module, member: Member) -> nn.Module:
    return fully_shard(with_layers_as_shards(stage, member), mesh=member.mesh)


def with_layers_as_shards(stage: nn.Module, member: Member) -> nn.Module:
    for module in stage.children():
        if [*module.parameters()]:
            fully_shard(module, mesh=member.mesh)
    return stage


def compiled_shards(stage: nn.Module, member: Member) -> nn.Module:
    return torch.compile(as_shards(stage, member), backend="eager")  # type: ignore[return-value]


def as_shards_reduced_in_float32(stage: nn.Module, member: Member) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(stage, mesh=member.mesh, mp_policy=policy)


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
    compiled_shards,
    as_shards_reduced_in_float32,
)


class Trial:
    """A wrapped stage in a pipeline, and the same stages unsplit on the batch of both replicas."""

    def __init__(
        self,
        member: Member,
        wrap: Wrap,
        *,
        kind: Callable[[], nn.Module] = two_layers,
        num_rows: int = 7,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 4,
    ) -> None:
        stages = stages_of(kind)
        self.member = member
        self.expected = copy.deepcopy(stages)
        self.stage = wrap(stages[member.stage], member)
        self.num_rows = num_rows
        self.pipeline = Pipeline(
            self.stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
            loss_fn=mse,
            process_group=member.pipeline,
            timeout_s=TIMEOUT_S,
        )

    def given(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of both replicas."""
        return rows(2 * self.num_rows, seed=seed), rows(2 * self.num_rows, seed=seed + 100)

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2)[self.member.replica]

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
            self.stage.parameters(), self.expected[self.member.stage].parameters(), strict=True
        )
        return max(relative_error(whole(p.grad), e.grad) for p, e in pairs)

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


def whole(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
