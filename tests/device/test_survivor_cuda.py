"""A peer is killed while this rank is in a call that waits for the device, or has much enqueued.

What the peer has sent stands behind work that its device never does, so that this rank's streams
wait for it; the check runs it with lazy and with eager loading of kernels.
PIPECOMM_CHECK_DEVICE=cpu rehearses it with the host as the device, whose streams lag instead.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm import BackendOptions
from pipecomm.errors import PeerLostError
from tests.ranks import run_ranks

DEVICE = os.environ.get("PIPECOMM_CHECK_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
_ENV = {} if IS_CUDA else {"PIPECOMM_STAND_IN_DEVICE": "1", "PIPECOMM_STAND_IN_LAG_US": "20000"}
# About 20 s of a GPU's clock: longer than the peer lives.
_LONG_CYCLES = 40_000_000_000
# In which torch has kernels that nothing before has launched.
_FIRST_LAUNCHES = (torch.erfinv, torch.lgamma, torch.digamma, torch.i0, torch.sinc, torch.logit)


def _launch() -> Callable[[], object]:
    x = torch.full((8,), 0.25, device=DEVICE)
    functions = itertools.cycle(_FIRST_LAUNCHES)
    return lambda: next(functions)(x)


def _allocate() -> Callable[[], object]:
    """Of no size that torch has in its cache."""
    nbytes = itertools.count(64 << 20, 4 << 20)
    return lambda: torch.empty(next(nbytes), dtype=torch.uint8, device=DEVICE)


def _nothing() -> Callable[[], object]:
    return lambda: None


CASES = {
    "first launch": (4, 4 << 20, _launch),
    "allocation": (4, 4 << 20, _allocate),
    "2000 receives": (2000, 64, _nothing),
}


def _survives(rank: int, size: int, store_path: str, case: str) -> str:
    count, numel, make_call = CASES[case]
    dist.init_process_group(
        "pipecomm",
        rank=rank,
        world_size=size,
        store=dist.FileStore(store_path, size),
        timeout=timedelta(seconds=40),
        pg_options=BackendOptions(),
    )
    buffers = [torch.zeros(numel, device=DEVICE) for _ in range(count)]
    call = make_call()
    if rank == 1:
        dist.recv(buffers[0], 0)
        if IS_CUDA:
            torch.cuda._sleep(_LONG_CYCLES)
        for buffer in buffers:
            dist.isend(buffer, 0)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(buffers[0], 1)
    with pytest.raises(PeerLostError) as caught:
        _receive_for_ever(buffers, call)
    dist.destroy_process_group()
    assert torch.ones(4, device=DEVICE).sum().item() == 4
    return str(caught.value)


def _receive_for_ever(buffers: list[torch.Tensor], call: Callable[[], object]) -> None:
    """All at once, then as many again, until a wait raises."""
    while True:
        for work in [dist.irecv(buffer, 1) for buffer in buffers]:
            work.wait()
            call()


@pytest.mark.parametrize("case", CASES)
def test_survivor_is_told_and_its_device_is_free(case: str) -> None:
    outcomes = run_ranks(2, _survives, case, env=_ENV, timeout_s=18)
    assert outcomes[0][0] == "ok", outcomes[0]
    assert "rank 1" in outcomes[0][1]
    assert outcomes[1] == ("died", -signal.SIGKILL)
