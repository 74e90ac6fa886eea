"""A message that its receiver has no memory for is the same class of error on both sides."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipecomm.codecs.codec import Codec
from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import LinkTimeoutError, PoolExhaustedError, StageFailedError
from pipecomm.links.link import Links
from pipecomm.memory.pool import MemoryPool
from tests.drop_in.backend_ranks import init
from tests.ranks import spawn_ranks

MIB = 1 << 20
WAYS = {"shared memory": {}, "tcp": {"PIPECOMM_TRANSPORT": "tcp"}}


def _class_of_error(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(MemoryError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def _through_links(rank: int, size: int, store_path: str) -> tuple[str, str]:
    """More than the pool of rank 1 may hold, and more than the ring."""
    pool = MemoryPool(limit=2 * MIB) if rank == 1 else None
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=30, pool=pool)
    links.begin_step(1)
    if rank == 1:
        receive = links.receive(0, direction="forward", microbatch=0)
        result = _class_of_error(receive.wait)
    else:
        large = torch.ones(4 * MIB)
        send = links.send(1, [large], direction="forward", microbatch=0, codec=Codec("raw"))
        result = _class_of_error(send.wait)
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])
    links.close()
    return result


def _through_the_backend(rank: int, size: int, store_path: str) -> tuple[str, str]:
    """Rank 1 asks for something else first, so that the message is parked, and may map no more."""
    init(rank, size, store_path)
    large, small = torch.ones(64 * MIB), torch.zeros(1)
    dist.send(small, 1) if rank == 0 else dist.recv(small, 0)  # the ring is made
    dist.barrier()
    if rank == 0:
        work = dist.isend(large, 1, tag=2)
        assert work is not None
        result = _class_of_error(work.wait)
    else:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, resource.RLIM_INFINITY))
        other = dist.irecv(small, 0, tag=1)
        assert other is not None
        with pytest.raises(LinkTimeoutError):
            other.wait(timedelta(seconds=0.5))
        result = _class_of_error(lambda: dist.recv(large, 0, tag=2))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [_through_links, _through_the_backend])
def test_message_without_memory_is_the_same_error_on_both_sides(case: Any, way: str) -> None:
    env = {**os.environ, **WAYS[way]}
    sent, received = spawn_ranks(2, case, timeout_s=60, env=env)
    assert (sent[0], received[0]) == ("PoolExhaustedError", "PoolExhaustedError")
    assert "rank 1 refused a message: " in sent[1]


def _train(rank: int, size: int, store_path: str) -> tuple[bool, str]:
    """One microbatch's activation does not fit the last stage's pool."""
    init(rank, size, store_path)
    rows = torch.ones(MIB, 4)
    pool = MemoryPool(limit=2 * MIB) if rank == 1 else None
    with Pipeline(
        nn.Linear(4, 4),
        num_microbatches=1,
        loss_fn=nn.functional.mse_loss,
        pool=pool,
        timeout_s=30,
    ) as pipeline:
        with pytest.raises(MemoryError) as caught:
            pipeline.train_step(rows if rank == 0 else None, rows if rank == 1 else None)
        error = caught.value
    return isinstance(error, (PoolExhaustedError, StageFailedError)), str(error)


def test_stage_without_memory_for_its_input_raises_a_memory_error_on_every_rank() -> None:
    for is_known, text in spawn_ranks(2, _train, timeout_s=60):
        assert is_known, text
        assert "pool" in text
