"""CUDA tensors between two processes on one GPU: what arrives, when, and who waits for what.

The same functions run with DEVICE "cpu" and PIPECOMM_STAND_IN_DEVICE=1 as a rehearsal
(PIPECOMM_CHECK_DEVICE=cpu); what needs a GPU's clock is left out there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining

import pipecomm
from pipecomm import BackendOptions
from pipecomm.errors import ConfigError, MessageMismatchError, PeerLostError
from tests.ranks import run_ranks, spawn_ranks

DEVICE = os.environ.get("PIPECOMM_CHECK_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
_LARGE = 16 << 20  # float32 values: 64 MiB, more than the slots of a link hold


def _init(rank: int, size: int, store_path: str, **options: object) -> None:
    dist.init_process_group(
        "pipecomm",
        rank=rank,
        world_size=size,
        store=dist.FileStore(store_path, size),
        timeout=timedelta(seconds=30),
        pg_options=BackendOptions(**options),  # type: ignore[arg-type]
    )


def _synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def _values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).mul(100).to(dtype)


def _arrives(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for numel in (1, 1000, 1 << 20, (5 << 20) + 3):
            sent = _values(numel, dtype)
            if rank == 0:
                dist.send(sent.to(DEVICE), 1)
                continue
            got = torch.zeros_like(sent, device=DEVICE)
            dist.recv(got, 0)
            assert torch.equal(got.cpu(), sent), (dtype, numel)


def _arrives_quantized(rank: int, size: int, store_path: str, codec: str) -> None:
    _init(rank, size, store_path, codec=codec)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sent = _values(3000 * 771, dtype).view(3000, 771)
        if rank == 0:
            dist.send(sent.to(DEVICE), 1)
            continue
        got = torch.zeros_like(sent, device=DEVICE)
        dist.recv(got, 0)
        host = pipecomm.Codec(codec)
        expected = host.decode(host.encode(sent), torch.empty_like(sent))
        assert torch.equal(got.cpu(), expected), dtype


def _both_ways_at_once(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    peer = 1 - rank
    for turn in range(5):
        sent = torch.full((_LARGE,), float(10 * rank + turn), device=DEVICE)
        got = torch.empty(_LARGE, device=DEVICE)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        )
        for work in works:
            work.wait()
        sent.fill_(-1)  # in stream order after the transfer
        assert bool((got == 10 * peer + turn).all())


def _follows_the_streams(rank: int, size: int, store_path: str) -> None:
    """Sends what kernels have still to write; receives into what they still read."""
    _init(rank, size, store_path)
    width = 2048 if IS_CUDA else 128
    x = torch.randn(width, width, device=DEVICE)
    for turn in range(5):
        busy = x
        for _ in range(20):
            busy = busy @ x
            busy = busy / busy.norm()
        if rank == 0:
            sent = torch.full((1 << 20,), float(turn), device=DEVICE) + 0 * busy.sum()
            dist.isend(sent, 1).wait()
            del sent  # its memory may be used again, in stream order
            torch.full((1 << 20,), -5.0, device=DEVICE)
            continue
        got = torch.full((1 << 20,), -1.0, device=DEVICE)
        before = got.sum() + 0 * busy.sum()
        dist.irecv(got, 0).wait()
        after = got.sum()
        assert before.item() == -(1 << 20)
        assert after.item() == turn * (1 << 20)


def _wait_does_not_stop_the_host(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    x = torch.randn(8192, 8192, device=DEVICE)
    dist.barrier()
    got = torch.empty(1 << 20, device=DEVICE)
    warm = dist.irecv(got, 0) if rank else dist.isend(got, 1)
    warm.wait()
    _synchronize()
    start = time.perf_counter()
    for _ in range(40):
        x = x @ x
        x = x / x.norm()
    work = dist.irecv(got, 0) if rank else dist.isend(got, 1)
    work.wait()
    enqueued_s = time.perf_counter() - start
    _synchronize()
    done_s = time.perf_counter() - start
    assert enqueued_s < done_s / 2, (enqueued_s, done_s)


def _mismatch_is_told(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    if rank == 0:
        dist.send(torch.ones(3, device=DEVICE), 1)
        dist.send(torch.full((_LARGE,), 2.0, device=DEVICE), 1)
        return
    with pytest.raises(MessageMismatchError):
        dist.recv(torch.empty(4, device=DEVICE), 0)
    got = torch.empty(_LARGE, device=DEVICE)
    dist.recv(got, 0)
    assert bool((got == 2).all())


def _host_and_device_meet(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    here, there = ("cpu", DEVICE) if rank else (DEVICE, "cpu")
    for place in (here, there):
        got = torch.empty(1 << 20, device=place)
        sent = torch.full((1 << 20,), float(rank), device=place)
        work = dist.isend(sent, 1 - rank)
        dist.recv(got, 1 - rank)
        work.wait()
        assert bool((got == 1 - rank).all())


def _graph_capture_is_refused(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    x = torch.ones(4, device=DEVICE)
    if rank == 0:
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ConfigError, match="capture"), torch.cuda.graph(graph):
            dist.isend(x, 1)
    torch.cuda.synchronize()
    dist.barrier()


def _receive_for_ever(got: torch.Tensor) -> None:
    while True:
        dist.irecv(got, 1).wait()
        _synchronize()


def _dies(rank: int, size: int, store_path: str) -> str:
    _init(rank, size, store_path)
    got = torch.zeros(_LARGE, device=DEVICE)
    if rank == 0:
        dist.recv(got, 1)
        with pytest.raises(PeerLostError) as caught:
            _receive_for_ever(got)
        return str(caught.value)
    dist.send(got, 0)
    dist.isend(got, 0)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _pipelining_step(rank: int, size: int, store_path: str) -> None:
    _init(rank, size, store_path)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(size)]
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    hidden = x
    for layer in layers:
        hidden = layer(hidden)
    reference = torch.nn.functional.mse_loss(hidden, y)
    reference.backward()
    expected = [parameter.grad for parameter in layers[rank].parameters()]

    device = torch.device(DEVICE)
    module = layers[rank].to(device)
    module.zero_grad()
    stage = pipelining.PipelineStage(module, rank, size, device)
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x.to(device))
    else:
        schedule.step(target=y.to(device), losses=losses)
        assert abs(torch.stack(losses).mean().item() - reference.item()) < 1e-5
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-3, atol=1e-5)


EVERYWHERE: list[Callable[..., None]] = [
    _arrives,
    _both_ways_at_once,
    _follows_the_streams,
    _mismatch_is_told,
    _host_and_device_meet,
    _pipelining_step,
]
ON_A_GPU: list[Callable[..., None]] = [_wait_does_not_stop_the_host, _graph_capture_is_refused]
_ENV = {} if IS_CUDA else {"PIPECOMM_STAND_IN_DEVICE": "1"}


@pytest.mark.parametrize(
    "check", EVERYWHERE + ON_A_GPU * IS_CUDA, ids=lambda check: check.__name__.strip("_")
)
def test_two_ranks(check: Callable[..., None]) -> None:
    spawn_ranks(2, check, env=_ENV, timeout_s=90)


@pytest.mark.parametrize("codec", ["int8", "int4", "int4:hadamard=64", "nf4"])
def test_quantized_tensor_has_the_hosts_values(codec: str) -> None:
    spawn_ranks(2, _arrives_quantized, codec, env=_ENV, timeout_s=90)


def test_one_queue_for_all_streams_is_enough() -> None:
    env = {**_ENV, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    spawn_ranks(2, _both_ways_at_once, env=env, timeout_s=90)


def test_killed_peer_is_named_and_its_device_work_let_go() -> None:
    outcomes = run_ranks(2, _dies, env=_ENV, timeout_s=60)
    assert outcomes[0][0] == "ok", outcomes[0]
    assert "rank 1" in outcomes[0][1]
