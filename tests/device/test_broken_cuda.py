"""An illegal access in one rank: its own transfers name the device, and the peer hears at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm import BackendOptions
from pipecomm.errors import CudaError, TransportError
from tests.ranks import spawn_ranks

# Longer than the peer may take to hear of it; the rank with the broken device lives on meanwhile.
_HEARD_S = 10.0
_KERNEL = 'extern "C" __global__ void breaks(float* x) { *reinterpret_cast<float*>(8) = *x; }'


def _break_device() -> None:
    """By an access to an address that nobody has; the error stays until the process ends."""
    x = torch.ones(1, device="cuda")
    torch.cuda._compile_kernel(_KERNEL, "breaks")((1, 1, 1), (1, 1, 1), (x,))


def _for_ever(call: Callable[[], object]) -> None:
    while True:
        call()
        time.sleep(0.01)


def _breaks(rank: int, size: int, store_path: str) -> str:
    dist.init_process_group(
        "pipecomm",
        rank=rank,
        world_size=size,
        store=dist.FileStore(store_path, size),
        timeout=timedelta(seconds=40),
        pg_options=BackendOptions(),
    )
    value = torch.ones(1 << 20, device="cuda")
    dist.send(value, 1 - rank) if rank == 0 else dist.recv(value, 1 - rank)
    torch.cuda.synchronize()
    start_s = time.monotonic()
    if rank == 1:
        _break_device()
        with pytest.raises((CudaError, TransportError, RuntimeError)) as caught:
            _for_ever(lambda: dist.irecv(value, 0).wait())
        time.sleep(2 * _HEARD_S)
        return f"{type(caught.value).__name__}: {caught.value}"
    with pytest.raises(TransportError) as heard:
        _for_ever(lambda: dist.isend(value, 1).wait())
    assert time.monotonic() - start_s < _HEARD_S
    return f"{type(heard.value).__name__}: {heard.value}"


def test_illegal_access_is_told_to_both() -> None:
    survivor, broken = spawn_ranks(2, _breaks, timeout_s=50)
    assert "rank 1" in survivor
    assert "CUDA" in broken
