"""torch.distributed.pipelining's own schedules, unmodified, over the pipecomm backend."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from pipecomm.drop_in.backend import BackendOptions
from tests.drop_in.backend_ranks import init
from tests.ranks import spawn_ranks

_WIDTH = 16

# One stage on each rank.
_SINGLE = ("GPipe", "1F1B")
# Two stages on each rank, in turns.
_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
# Two stages on each rank, there and back: the first rank has the first and the last.
_FOLDED = ("ZBVZeroBubble", "DualPipeV")
_SCHEDULES = (*_SINGLE, *_LOOPED, *_FOLDED)


def _stages_of(name: str, rank: int, size: int) -> list[int]:
    if name in _SINGLE:
        return [rank]
    return [rank, rank + size if name in _LOOPED else 2 * size - 1 - rank]


def _layers(num_stages: int) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())
        for _ in range(num_stages)
    )


def _gradients(layers: torch.nn.ModuleList, stages: list[int]) -> list[torch.Tensor | None]:
    return [parameter.grad for stage in stages for parameter in layers[stage].parameters()]


def _reference(
    stages: list[int], num_stages: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, list[torch.Tensor | None]]:
    """Loss of the unsplit model, and its gradients that belong to some stages."""
    layers = _layers(num_stages)
    hidden = x
    for layer in layers:
        hidden = layer(hidden)
    loss = torch.nn.functional.mse_loss(hidden, y)
    loss.backward()
    return loss.item(), _gradients(layers, stages)


def _step(
    name: str, mine: list[int], num_stages: int, x: torch.Tensor, y: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """This rank's microbatch losses, and the gradients of its stages."""
    layers = _layers(num_stages)
    group = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("stage",)).get_group()
    assert dist.get_backend(group) == "pipecomm"
    stages = [
        pipelining.PipelineStage(layers[index], index, num_stages, torch.device("cpu"), group=group)
        for index in mine
    ]
    schedule = pipelining.schedules.get_schedule_class(name)(
        stages if len(stages) > 1 else stages[0],
        2 * dist.get_world_size(),
        loss_fn=torch.nn.functional.mse_loss,
    )
    losses: list[torch.Tensor] = []
    for _ in range(2):
        layers.zero_grad()
        losses.clear()
        targets = {"target": y, "losses": losses} if num_stages - 1 in mine else {}
        schedule.step(*((x,) if 0 in mine else ()), **targets)
    return losses, _gradients(layers, mine)


def _problem(name: str, rank: int, size: int) -> str | None:
    """What is wrong with a step of the schedule; None if it does what the unsplit model does."""
    mine = _stages_of(name, rank, size)
    num_stages = size * len(mine)
    torch.manual_seed(1)
    x, y = torch.randn(4 * size, _WIDTH), torch.randn(4 * size, _WIDTH)
    loss, expected = _reference(mine, num_stages, x, y)
    losses, gradients = _step(name, mine, num_stages, x, y)
    for got, want in zip(gradients, expected, strict=True):
        if got is None or not torch.allclose(got, want, rtol=1e-5, atol=1e-7):
            return f"gradient {got}, expected {want}"
    if num_stages - 1 in mine and abs(torch.stack(losses).mean().item() - loss) > 1e-5:
        return f"losses {losses}, expected {loss}"
    return None


def _replicas(rank: int, size: int, store_path: str) -> None:
    """Two replicas of two stages; their gradients are averaged. As the joined batch gives."""
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    averages = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replica, stage_index = rank % 2, rank // 2
    torch.manual_seed(1)
    x, y = torch.randn(16, _WIDTH), torch.randn(16, _WIDTH)
    layers = _layers(2)
    stage = pipelining.PipelineStage(
        layers[stage_index], stage_index, 2, torch.device("cpu"), group=pipelines[replica]
    )
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    mine = slice(8 * replica, 8 * replica + 8)
    for _ in range(3):
        layers.zero_grad()
        schedule.step(*([x[mine]] if stage_index == 0 else []), target=y[mine])
        for parameter in layers[stage_index].parameters():
            dist.all_reduce(parameter.grad, group=averages[stage_index])
            parameter.grad /= 2
    _, expected = _reference([stage_index], 2, x, y)
    for got, want in zip(_gradients(layers, [stage_index]), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)


def _quantized(rank: int, size: int, store_path: str) -> str | None:
    """With codecs in both directions gradients are near, but not equal: the wire was quantized."""
    options = BackendOptions(codec="int8", grad_codec="int8", min_nbytes=0)
    init(rank, size, store_path + ".quantized", pg_options=options)
    torch.manual_seed(1)
    x, y = torch.randn(4 * size, _WIDTH), torch.randn(4 * size, _WIDTH)
    _, expected = _reference([rank], size, x, y)
    _, gradients = _step("1F1B", [rank], size, x, y)
    dist.destroy_process_group()
    got, want = (torch.cat([g.flatten() for g in gs]) for gs in (gradients, expected))
    error = ((got - want).norm() / want.norm()).item()
    return None if 1e-4 < error < 0.05 else f"relative error of the gradients: {error}"


def _all_problems(rank: int, size: int, store_path: str) -> dict[str, str | None]:
    init(rank, size, store_path)
    problems = {name: _problem(name, rank, size) for name in _SCHEDULES}
    if size == 4:
        try:
            _replicas(rank, size, store_path)
        except Exception:
            problems["replicas"] = traceback.format_exc()
    dist.destroy_process_group()
    problems["quantized"] = _quantized(rank, size, store_path)
    return problems


def _both_sizes(rank: int, size: int, store_path: str) -> dict[int, dict[str, str | None]]:
    problems = {size: _all_problems(rank, size, store_path)}
    if rank < 2:
        problems[2] = _all_problems(rank, 2, store_path + ".two")
    return problems


@pytest.fixture(scope="module")
def problems() -> dict[int, list[dict[str, str | None]]]:
    """World size -> by rank, by schedule."""
    of_ranks = spawn_ranks(4, _both_sizes, timeout_s=150)
    return {size: [one[size] for one in of_ranks if size in one] for size in (2, 4)}


def test_every_schedule_torch_has_is_among_them() -> None:
    with pytest.raises(ValueError, match="valid options") as caught:
        pipelining.schedules.get_schedule_class("no such schedule")
    known = str(caught.value).partition("[")[2].rstrip("]").replace("'", "").split(", ")
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    assert set(known) - bases == set(_SCHEDULES)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", _SCHEDULES)
def test_schedule_gives_the_gradients_of_the_unsplit_model(
    name: str, size: int, problems: dict[int, list[dict[str, str | None]]]
) -> None:
    assert [of_rank[name] for of_rank in problems[size]] == [None] * size


@pytest.mark.parametrize("size", [2, 4])
def test_codecs_hold_for_the_messages_of_torchs_pipelines(
    size: int, problems: dict[int, list[dict[str, str | None]]]
) -> None:
    assert [of_rank["quantized"] for of_rank in problems[size]] == [None] * size


def test_pipelines_inside_data_parallel_groups_give_the_gradients_of_the_joined_batch(
    problems: dict[int, list[dict[str, str | None]]],
) -> None:
    assert [of_rank.get("replicas") for of_rank in problems[4]] == [None] * 4
