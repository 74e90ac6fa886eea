"""Tensors in pool memory that the receiver reads where they lie: what arrives when who dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomm import MemoryPool
from pipecomm.codecs.codec import Codec
from pipecomm.errors import MessageMismatchError, PeerLostError
from pipecomm.links.link import Links
from tests.patience import patient
from tests.ranks import run_ranks, spawn_ranks

RAW = Codec("raw")
NUM_FLOATS = 3_000_000  # 12 MB, more than a ring holds


def _pooled(value: float, num_floats: int = NUM_FLOATS) -> torch.Tensor:
    return MemoryPool().empty((num_floats,), torch.float32).fill_(value)


def _relay(rank: int, size: int, store_path: str) -> list[float]:
    """Each rank sends on what it has received, which lies in its pool; and writes to it then."""
    links = Links.connect(dist.FileStore(store_path, size), rank, size, timeout_s=patient(30))
    sums = []
    for step in range(1, 4):
        links.begin_step(step)
        tensor: torch.Tensor | None = _pooled(step)
        if rank > 0:
            (tensor,) = links.receive(rank - 1, direction="forward", microbatch=0).wait()
        assert tensor is not None
        if rank < size - 1:
            sending = links.send(rank + 1, [tensor], direction="forward", microbatch=0, codec=RAW)
            sending.wait()
            tensor.fill_(-1.0)
        else:
            sums.append(float(tensor.mean()))
    links.close()
    return sums


def test_what_was_received_is_sent_on_from_the_pool_and_may_be_written_then() -> None:
    assert spawn_ranks(3, _relay, timeout_s=60)[2] == [1.0, 2.0, 3.0]


def _exchange(rank: int, size: int, store_path: str) -> bool:
    store = dist.FileStore(store_path, size)
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store)
    mine, theirs = _pooled(rank), _pooled(-1.0)
    ops = [
        dist.P2POp(dist.isend, mine[1:], 1 - rank),
        dist.P2POp(dist.irecv, theirs[:-1], 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.destroy_process_group()
    return bool((theirs[:-1] == 1 - rank).all()) and float(theirs[-1]) == -1.0


def test_parts_of_pool_tensors_are_exchanged_through_torch_distributed() -> None:
    assert spawn_ranks(2, _exchange, timeout_s=60) == [True, True]


def _refuse(rank: int, size: int, store_path: str) -> list[str]:
    store = dist.FileStore(store_path, size)
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store)
    mine = _pooled(1.0)
    outcomes = []
    for _ in range(10):
        try:
            if rank == 0:
                dist.send(mine, 1)
            else:
                dist.recv(torch.zeros(4), 0)
            outcomes.append("ok")
        except MessageMismatchError:
            outcomes.append("refused")
    dist.destroy_process_group()
    return outcomes


def test_pool_tensor_that_does_not_fit_is_an_error_on_both_sides_each_time() -> None:
    assert spawn_ranks(2, _refuse, timeout_s=60) == [["refused"] * 10, ["refused"] * 10]


def _segments_of_peers() -> int:
    """Mappings of memory that this process may only read."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("pipecomm" in line and line.split()[1] == "r--s" for line in lines)


def _lose_the_owner(rank: int, size: int, store_path: str) -> list[int]:
    store = dist.FileStore(store_path, size)
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store)
    if rank == 0:
        mine = _pooled(1.0)
        dist.send(mine, 1)
        dist.recv(torch.zeros(1), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    target = torch.zeros(NUM_FLOATS)
    dist.recv(target, 0)
    counts = [_segments_of_peers()]
    dist.send(torch.zeros(1), 0)
    with pytest.raises(PeerLostError):
        dist.recv(target, 0)
    counts.append(_segments_of_peers())
    return counts


def test_memory_of_a_dead_owner_is_let_go() -> None:
    outcomes: list[Any] = run_ranks(2, _lose_the_owner, timeout_s=60)
    assert outcomes[1] == ("ok", [1, 0])


def _send_to_one_that_dies(rank: int, size: int, store_path: str, victim: int) -> str:
    links = Links.connect(dist.FileStore(store_path, size), rank, size, timeout_s=patient(30))
    links.begin_step(1)
    large = _pooled(1.0, 64_000_000) if rank == 0 else None
    links.gather(torch.zeros(1))
    links.begin_step(2)
    if rank == victim:
        threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for microbatch in range(1000):
            if rank == 0:
                assert large is not None
                sending = links.send(
                    1, [large], direction="forward", microbatch=microbatch, codec=RAW
                )
                sending.wait()
            else:
                links.receive(0, direction="forward", microbatch=microbatch).wait()
    except PeerLostError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("victim", [0, 1])
def test_survivor_of_a_rank_killed_while_a_pool_tensor_is_read_names_it(victim: int) -> None:
    outcomes: list[Any] = run_ranks(2, _send_to_one_that_dies, victim, timeout_s=60)
    assert outcomes[victim] == ("died", -signal.SIGKILL)
    kind, text = outcomes[1 - victim]
    assert kind == "ok", text
    assert f"rank {victim} is lost" in text


def _send_and_exit(rank: int, size: int, store_path: str) -> bool:
    store = dist.FileStore(store_path, size)
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store)
    if rank == 0:
        tensor, small = _pooled(7.0), torch.zeros(1)
        dist.isend(tensor, 1)
        dist.send(small, 1, tag=1)  # behind it in the ring
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    target = torch.zeros(NUM_FLOATS)
    dist.recv(target, 0)
    return bool((target == 7.0).all())


def test_pool_tensor_of_a_rank_that_died_after_telling_of_it_still_arrives() -> None:
    outcomes = run_ranks(2, _send_and_exit, timeout_s=60)
    assert outcomes[1] == ("ok", True)
