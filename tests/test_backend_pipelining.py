"""torch.distributed.pipelining's own schedules, unmodified, over the pipecomm backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from tests.backend_ranks import init
from tests.ranks import spawn_ranks

_NUM_MICROBATCHES = 4
_WIDTH = 16

# Schedule, and stages on each of the two ranks.
_SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
}


def _layers(num_stages: int) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())
        for _ in range(num_stages)
    )


def _reference(
    num_stages: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the unsplit model."""
    layers = _layers(num_stages)
    hidden = x
    for layer in layers:
        hidden = layer(hidden)
    loss = torch.nn.functional.mse_loss(hidden, y)
    loss.backward()
    return loss.item(), [
        parameter.grad for parameter in layers.parameters() if parameter.grad is not None
    ]


def _step(
    rank: int, size: int, name: str, per_rank: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's microbatch losses, and its gradients by parameter of the whole model."""
    num_stages = size * per_rank
    layers = _layers(num_stages)
    mine = range(rank, num_stages, size)
    group = init_device_mesh("cpu", (size,), mesh_dim_names=("stage",)).get_group("stage")
    assert dist.get_backend(group) == "pipecomm"
    stages = [
        pipelining.PipelineStage(layers[index], index, num_stages, torch.device("cpu"), group=group)
        for index in mine
    ]
    schedule_class = pipelining.schedules.get_schedule_class(name)
    schedule = schedule_class(
        stages if per_rank > 1 else stages[0],
        _NUM_MICROBATCHES,
        loss_fn=torch.nn.functional.mse_loss,
    )
    losses: list[torch.Tensor] = []
    for _ in range(2):
        layers.zero_grad()
        losses.clear()
        inputs = (x,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*inputs, target=y, losses=losses)
        else:
            schedule.step(*inputs)
    return losses, [p.grad for i in mine for p in layers[i].parameters() if p.grad is not None]


def _all_schedules(rank: int, size: int, store_path: str) -> dict[str, str]:
    init(rank, size, store_path)
    failures: dict[str, str] = {}
    for name, per_rank in _SCHEDULES.items():
        torch.manual_seed(1)
        x, y = torch.randn(8, _WIDTH), torch.randn(8, _WIDTH)
        loss, expected = _reference(size * per_rank, x, y)
        losses, gradients = _step(rank, size, name, per_rank, x, y)
        mine = [
            expected[2 * stage + k] for stage in range(rank, size * per_rank, size) for k in (0, 1)
        ]
        if len(gradients) != len(mine):
            failures[name] = f"{len(gradients)} gradients, expected {len(mine)}"
        for got, want in zip(gradients, mine, strict=False):
            if not torch.allclose(got, want, rtol=1e-5, atol=1e-7):
                failures[name] = f"gradients differ by {(got - want).abs().max()}"
        if losses and abs(sum(one.item() for one in losses) / len(losses) - loss) > 1e-5:
            failures[name] = f"losses {losses}, expected {loss}"
    dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return spawn_ranks(2, _all_schedules, timeout_s=90)


@pytest.mark.parametrize("name", _SCHEDULES)
def test_schedule_gives_the_gradients_of_the_unsplit_model(
    name: str, failures: list[dict[str, str]]
) -> None:
    assert [of_rank.get(name) for of_rank in failures] == [None, None]
