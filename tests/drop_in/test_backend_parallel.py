"""What torch builds on process groups, unmodified, in a pipecomm world: FSDP and its like."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.drop_in.backend_ranks import init
from tests.ranks import spawn_ranks

_WIDTH = 8

# check(rank, size, folder): raises if something is wrong. `folder` is the same on all ranks.
Check = Callable[[int, int, Path], None]


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, 2 * _WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * _WIDTH, _WIDTH)
    )


def _batch(size: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2 * size, _WIDTH)


def _expected(size: int) -> dict[str, torch.Tensor]:
    """Gradients of one model that sees the batches of all ranks."""
    model = _model()
    model(_batch(size)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_gradients(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    got = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert whole is not None
        assert torch.allclose(whole, expected[name], rtol=1e-5, atol=1e-7), name


def ddp_gives_the_gradients_of_one_model(rank: int, size: int, folder: Path) -> None:
    model = DistributedDataParallel(_model())
    model(_batch(size)[2 * rank : 2 * rank + 2]).square().mean().backward()
    _check_gradients(model, _expected(size))


def fsdp_gives_the_gradients_of_one_model(rank: int, size: int, folder: Path) -> None:
    model = _model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    model(_batch(size)[2 * rank : 2 * rank + 2]).square().mean().backward()
    _check_gradients(model, _expected(size))


def tensor_parallel_gives_the_gradients_of_one_model(rank: int, size: int, folder: Path) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_model(), init_device_mesh("cpu", (size,)), plan)
    model(_batch(size)).square().mean().backward()
    _check_gradients(model, _expected(size))


def fsdp_over_tensor_parallel_gives_the_gradients_of_one_model(
    rank: int, size: int, folder: Path
) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_model(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["replicas"])
    replica, count = mesh["replicas"].get_local_rank(), 2 * size // (size // 2)
    model(_batch(size)[count * replica : count * (replica + 1)]).square().mean().backward()
    _check_gradients(model, _expected(size))


def device_mesh_has_pipecomm_groups_in_every_dimension(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        group = mesh.get_group(name)
        assert "pipecomm" in dist.get_backend(group)
        members = dist.get_process_group_ranks(group)
        got = torch.zeros(1, dtype=torch.int64)
        at = members.index(rank)
        work = dist.isend(torch.tensor([rank]), members[at - 1], group) if at else None
        if at + 1 < len(members):
            dist.recv(got, members[at + 1], group)
            assert got.item() == members[at + 1]
        if work is not None:
            work.wait()


def functional_collectives_give_the_right_results(rank: int, size: int, folder: Path) -> None:
    group, mine = dist.group.WORLD, torch.full((size,), float(rank))
    total = sum(range(size))
    assert funcol.all_reduce(mine, "sum", group).tolist() == [total] * size
    gathered = funcol.all_gather_single(mine, 0, group)
    assert gathered.tolist() == [float(r) for r in range(size) for _ in range(size)]
    scattered = funcol.reduce_scatter_single(torch.arange(float(size)), "sum", 0, group)
    assert scattered.tolist() == [float(size * rank)]
    assert funcol.broadcast(mine, 1, group).tolist() == [1.0] * size
    swapped = funcol.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group)
    assert swapped.tolist() == [10.0 * source + rank for source in range(size)]
    turned = funcol.permute_tensor(mine, [(r + 1) % size for r in range(size)], group)
    assert turned.tolist() == [float((rank - 1) % size)] * size
    many = funcol.all_reduce_coalesced([mine, mine + 1], "sum", group)
    assert [one[0].item() for one in many] == [total, total + size]


def tensors_are_redistributed(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size * size).reshape(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), whole[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(columns.full_tensor(), whole)


def sharded_checkpoint_is_loaded_again(rank: int, size: int, folder: Path) -> None:
    mesh = DeviceMesh("cpu", list(range(size)))
    whole = torch.arange(4.0 * size).reshape(2 * size, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(3)}
        save(saved, checkpoint_id=str(folder))
        loaded = {
            "sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]),
            "step": torch.tensor(0),
        }
        load(loaded, checkpoint_id=str(folder))
    assert torch.equal(loaded["sharded"].full_tensor(), whole)
    assert loaded["step"].item() == 3


def sends_and_receives_work_beside_collectives(rank: int, size: int, folder: Path) -> None:
    to, source = (rank + 1) % size, (rank - 1) % size
    got, objects = torch.zeros(1000), [None]
    ops = [
        dist.P2POp(dist.irecv, got, source),
        dist.P2POp(dist.isend, torch.full((1000,), float(rank)), to),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [float(source)] * 1000
    total = torch.ones(1)
    pending = dist.all_reduce(total, async_op=True)
    if rank == 0:
        dist.send_object_list([{"rank": 0}], 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [{"rank": 0}]
    pending.wait()
    assert total.item() == size
    dist.barrier()


def profiler_shows_sends_and_receives(rank: int, size: int, folder: Path) -> None:
    to, source = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(3, 5)
    with torch.profiler.profile(record_shapes=True) as profiler:
        pending = [dist.isend(torch.ones(3, 5), to, tag=1), dist.irecv(got, source, tag=1)]
        pending += [dist.isend(torch.ones(7), to, tag=2), dist.irecv(torch.zeros(7), tag=2)]
        for work in pending:
            work.wait()
            work.wait()
    events = [event for event in profiler.events() if event.name.startswith("pipecomm:")]
    assert sorted((event.name, event.input_shapes) for event in events) == [
        ("pipecomm:recv", [[3, 5]]),
        ("pipecomm:recvAnySource", [[7]]),
        ("pipecomm:send", [[3, 5]]),
        ("pipecomm:send", [[7]]),
    ]
    assert all(event.is_async for event in events)


CHECKS: tuple[Check, ...] = (
    ddp_gives_the_gradients_of_one_model,
    fsdp_gives_the_gradients_of_one_model,
    tensor_parallel_gives_the_gradients_of_one_model,
    fsdp_over_tensor_parallel_gives_the_gradients_of_one_model,
    device_mesh_has_pipecomm_groups_in_every_dimension,
    functional_collectives_give_the_right_results,
    tensors_are_redistributed,
    sharded_checkpoint_is_loaded_again,
    sends_and_receives_work_beside_collectives,
    profiler_shows_sends_and_receives,
)


# Backend, and TORCH_DISTRIBUTED_DEBUG.
_WORLDS = (("pipecomm", "OFF"), ("cpu:pipecomm", "DETAIL"))


def _all_checks(rank: int, size: int, store_path: str) -> dict[tuple[str, str], str]:
    failures: dict[tuple[str, str], str] = {}
    for backend, level in _WORLDS:
        dist.set_debug_level(getattr(dist.DebugLevel, level))
        for check in CHECKS:
            path = f"{store_path}.{level}.{check.__name__}"
            init(rank, size, path, backend)
            try:
                check(rank, size, Path(path + ".files"))
            except BaseException:
                failures[backend, check.__name__] = traceback.format_exc()
            dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, str], str]]:
    """By rank, by backend and check, what went wrong."""
    return spawn_ranks(4, _all_checks, timeout_s=150)


@pytest.mark.parametrize("backend", [backend for backend, _ in _WORLDS])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_unmodified_torch(
    name: str, backend: str, failures: list[dict[tuple[str, str], str]]
) -> None:
    texts = [of_rank[backend, name] for of_rank in failures if (backend, name) in of_rank]
    assert not texts, "\n".join(texts)
