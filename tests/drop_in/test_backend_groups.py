"""Groups, collectives and what torch builds on them, on four ranks in a gloo world."""

from __future__ import annotations

import logging.handlers
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipecomm.drop_in import backend
from pipecomm.links.rendezvous import UnreachableError
from tests.drop_in.backend_ranks import Check, failures_of, init, names
from tests.ranks import run_ranks, spawn_ranks

Group = dist.ProcessGroup


def any_source_receive_tells_the_sender(rank: int, size: int, group: Group) -> None:
    if rank in (1, 2):
        for index in range(10):
            dist.send(torch.tensor([rank * 100 + index]), 0, group)
    elif rank == 0:
        seen: dict[int, list[int]] = {1: [], 2: []}
        for index in range(20):
            got = torch.zeros(1, dtype=torch.int64)
            if index % 2:
                source = dist.recv(got, group=group)
            else:
                work = dist.irecv(got, group=group)
                work.wait()
                source = work._source_rank()
            seen[source].append(int(got))
        assert seen == {peer: [peer * 100 + index for index in range(10)] for peer in (1, 2)}


def ring_of_batches_completes(rank: int, size: int, group: Group) -> None:
    got = torch.zeros(1)
    ops = [
        dist.P2POp(dist.isend, torch.full((1,), float(rank)), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, got, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.item() == (rank - 1) % size


def batch_of_some_ranks_as_first_call_completes(rank: int, size: int, group: Group) -> None:
    if rank in (1, 3):
        peer, got = 4 - rank, torch.zeros(1)
        ops = [
            dist.P2POp(dist.irecv, got, peer, group),
            dist.P2POp(dist.isend, torch.full((1,), float(rank)), peer, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.item() == peer


def ranks_of_a_subgroup_are_global_or_group_ranks(rank: int, size: int, group: Group) -> None:
    odd = dist.new_group([1, 3])
    if rank in (1, 3):
        peer, got = 4 - rank, [torch.zeros(1), torch.zeros(1)]
        ops = [dist.P2POp(dist.irecv, one, peer, odd) for one in got]
        ops += [
            dist.P2POp(dist.isend, torch.full((1,), 10.0 * rank + i), peer, odd) for i in (0, 1)
        ]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == len(ops)
        for work in works:
            work.wait()
        assert [one.item() for one in got] == [10.0 * peer, 10.0 * peer + 1]
    if rank == 1:
        dist.send(torch.ones(1), 3, odd)
        dist.send(torch.full((1,), 2.0), group_dst=1, group=odd)
        with pytest.raises(ValueError, match="both"):
            dist.send(torch.ones(1), 3, odd, group_dst=1)
    elif rank == 3:
        for value, source in ((1.0, {"src": 1}), (2.0, {"group_src": 0})):
            got = torch.zeros(1)
            dist.recv(got, group=odd, **source)
            assert got.item() == value
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dist.isend(torch.ones(1), 3, odd) is None
            assert dist.barrier(odd) is None
    dist.barrier(group)
    dist.destroy_process_group(odd)


def collectives_give_the_right_results(rank: int, size: int, group: Group) -> None:
    mine = torch.full((4,), float(rank))
    total = mine.clone()
    dist.all_reduce(total, group=group)
    assert total.tolist() == [6.0] * 4
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.ones(1000, dtype=dtype)
        dist.all_reduce(half, group=group)
        assert bool((half == 4).all())
    root = mine.clone()
    dist.broadcast(root, 2, group)
    assert root.tolist() == [2.0] * 4
    total = mine.clone()
    dist.reduce(total, 1, group=group)
    assert rank != 1 or total.tolist() == [6.0] * 4
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine, group)
    assert [int(part[0]) for part in parts] == [0, 1, 2, 3]
    flat = torch.empty(4 * size)
    dist.all_gather_single(flat, mine, group)
    assert flat.tolist() == [float(value) for value in range(size) for _ in range(4)]
    dist.barrier(group)


def scattering_collectives_give_the_right_results(rank: int, size: int, group: Group) -> None:
    out = torch.empty(1)
    dist.scatter(
        out, [torch.tensor([10.0 * i]) for i in range(size)] if rank == 0 else None, 0, group
    )
    assert out.item() == 10 * rank
    gathered = [torch.empty(1) for _ in range(size)] if rank == 3 else None
    dist.gather(out, gathered, 3, group)
    assert gathered is None or [one.item() for one in gathered] == [0, 10, 20, 30]
    dist.reduce_scatter_single(out, torch.arange(float(size)), group=group)
    assert out.item() == size * rank
    dist.reduce_scatter(out, [torch.tensor([float(i)]) for i in range(size)], group=group)
    assert out.item() == size * rank
    got = torch.empty(size)
    dist.all_to_all_single(got, torch.arange(float(size)) + 10 * rank, group=group)
    assert got.tolist() == [10.0 * source + rank for source in range(size)]
    lists = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(lists, [torch.tensor([float(rank)])] * size, group=group)
    assert [one.item() for one in lists] == [0, 1, 2, 3]
    group.monitored_barrier(timedelta(seconds=10))


def objects_are_gathered(rank: int, size: int, group: Group) -> None:
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group)
    assert gathered == [{"rank": source} for source in range(size)]


def subgroups_of_a_gloo_world_leave_it_unharmed(rank: int, size: int, group: Group) -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    pairs = [dist.new_group(ranks, backend="pipecomm") for ranks in ([0, 2], [1, 3])]
    mine, got = pairs[rank % 2], torch.zeros(1)
    if rank < 2:
        dist.send(torch.full((1,), float(rank)), rank + 2, mine)
    else:
        dist.recv(got, rank - 2, mine)
        assert got.item() == rank - 2
    for members, whole in ((2, mine), (4, None)):
        total = torch.ones(1)
        dist.all_reduce(total, group=whole)
        assert total.item() == members
    dist.destroy_process_group(mine)


def ddp_averages_gradients(rank: int, size: int, group: Group) -> None:
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(8, 1), torch.randn(size * 2, 8)
    model(inputs).mean().backward()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    model.zero_grad()
    replica = DistributedDataParallel(model, process_group=group)
    replica(inputs[rank * 2 : rank * 2 + 2]).mean().backward()
    assert torch.allclose(model.weight.grad, expected, rtol=1e-5, atol=1e-7)


CHECKS: tuple[Check, ...] = (
    any_source_receive_tells_the_sender,
    ring_of_batches_completes,
    batch_of_some_ranks_as_first_call_completes,
    ranks_of_a_subgroup_are_global_or_group_ranks,
    collectives_give_the_right_results,
    scattering_collectives_give_the_right_results,
    objects_are_gathered,
    subgroups_of_a_gloo_world_leave_it_unharmed,
    ddp_averages_gradients,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(4, CHECKS, world="gloo")


@pytest.mark.parametrize("name", names(CHECKS))
def test_four_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def _use_by_name(rank: int, size: int, store_path: str) -> None:
    for index, name in enumerate(
        ("pipecomm", "cpu:pipecomm", "cpu:pipecomm,cuda:gloo", "cpu:gloo,cuda:pipecomm")
    ):
        init(rank, size, f"{store_path}{index}", name)
        got = torch.zeros(1)
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(got, 0)
        dist.barrier()
        assert got.item() == rank
        assert name in (dist.get_backend_config(), "pipecomm")
        dist.destroy_process_group()


def _use_by_default(rank: int, size: int, store_path: str) -> None:
    """As torchtitan and others choose a backend: they ask torch's map by device."""
    dist.Backend.default_device_backend_map["cpu"] = "pipecomm"
    asked = dist.get_default_backend_for_device("cpu")
    assert asked == "pipecomm"
    for index, name in enumerate((asked, f"cpu:{asked}", None)):
        init(rank, size, f"{store_path}.default{index}", name)
        for group in (dist.group.WORLD, dist.new_group([0, 1])):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            work = dist.isend(total, 1 - rank, group)
            dist.recv(total, 1 - rank, group)
            work.wait()
            assert total.item() == 2
            dist.barrier(group)
            kind = type(group._get_backend(torch.device("cpu")))
            assert kind.__name__ == "PipecommBackend"
        dist.destroy_process_group()


def _other_host(*_: object, **__: object) -> None:
    raise UnreachableError("expected rank 1 to be reachable; got: it runs on another host")


def _use_without_shared_memory(rank: int, size: int, store_path: str) -> list[str]:
    lines = logging.handlers.BufferingHandler(10)
    logging.getLogger("pipecomm").addHandler(lines)
    backend.rendezvous.connect = _other_host
    init(rank, size, store_path)
    got = torch.zeros(1)
    work = dist.isend(torch.full((1,), float(rank)), 1 - rank, tag=3)
    dist.recv(got, 1 - rank, tag=3)
    work.wait()
    assert got.item() == 1 - rank
    if rank == 0:
        assert dist.recv(got) == 1
    else:
        dist.send(got, 0)
    dist.barrier()
    dist.destroy_process_group()
    return [line.getMessage() for line in lines.buffer]


def _by_name_and_without_shared_memory(rank: int, size: int, store_path: str) -> list[str]:
    _use_by_name(rank, size, store_path)
    _use_by_default(rank, size, store_path)
    return _use_without_shared_memory(rank, size, store_path)


@pytest.fixture(scope="module")
def log_lines() -> list[list[str]]:
    return spawn_ranks(2, _by_name_and_without_shared_memory)


def test_backend_is_found_by_name_per_device_and_by_default(log_lines: list[list[str]]) -> None:
    assert len(log_lines) == 2


def test_unreachable_ranks_are_reached_through_the_inner_backend(
    log_lines: list[list[str]],
) -> None:
    on_rank_0, on_rank_1 = log_lines
    assert len(on_rank_0) == 1
    assert "gloo" in on_rank_0[0]
    assert "another host" in on_rank_0[0]
    assert on_rank_1 == []


def test_world_of_one_rank_works(tmp_path: Path) -> None:
    init(0, 1, str(tmp_path / "store"))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1
    with pytest.raises(ValueError, match="rank"):
        dist.isend(total, 0)
    dist.destroy_process_group()


def _collective_over(rank: int, size: int, store_path: str) -> str:
    dist.init_process_group(
        "pipecomm", store=dist.FileStore(store_path, size), rank=rank, world_size=size
    )
    dist.all_reduce(torch.ones(1))
    return "done"


def test_interface_that_is_not_there_is_refused_listing_those_that_are() -> None:
    ((kind, (error, _)),) = run_ranks(
        1, _collective_over, env={"GLOO_SOCKET_IFNAME": "nosuch0"}, timeout_s=20
    )
    assert kind == "raised"
    assert "'nosuch0'" in error
    assert "Found: " in error
    assert "lo" in error.split("Found: ")[1]
