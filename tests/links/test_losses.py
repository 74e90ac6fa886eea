"""Receives posted after the sender was killed: what came whole is delivered, all else ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.errors import PeerLostError
from pipecomm.links.link import Links
from tests.drop_in.backend_ranks import init
from tests.ranks import run_ranks

# Of messages; the ring takes 4 MiB, headers included.
WHOLE_MIB = (1, 3)
HALF_MIB = (4, 5, 64)
# Far more than the two seconds promised: a loaded machine is not a fault.
NOTICED_S = 10.0
WAYS = {
    "shared memory": {},
    "tcp": {"PIPECOMM_TRANSPORT": "tcp"},
    "slots": {"PIPECOMM_STAND_IN_DEVICE": "1"},
}


def _numbers(mib: int) -> torch.Tensor:
    return torch.arange(mib << 18, dtype=torch.float32)


def _die_when_the_ring_is_full(store: Any, rank: int) -> None:
    time.sleep(0.5)
    store.set(f"pid of {rank}", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def _compute_until_dead(store: Any, ranks: Iterable[int]) -> None:
    for rank in ranks:
        pid = int(store.get(f"pid of {rank}"))
        while psutil.pid_exists(pid):
            time.sleep(0.01)
    time.sleep(0.5)


def _outcome(receive: Callable[[], torch.Tensor], sent: torch.Tensor) -> str:
    """What came of one receive."""
    started = time.monotonic()
    try:
        got = receive()
    except PeerLostError as error:
        text = str(error)
    else:
        return "whole" if torch.equal(got, sent) else "wrong numbers"
    seconds = time.monotonic() - started
    return text if seconds < NOTICED_S else f"after {seconds} s: {text}"


def _receive_late_by_backend(
    rank: int, size: int, store_path: str, mibs: tuple[int, ...], num_whole: int
) -> Any:
    """Rank r sends mibs[r - 1] and is killed; rank 0 computes meanwhile and receives later."""
    init(rank, size, store_path)
    store = dist.FileStore(store_path, size)
    tensors = [_numbers(mib) for mib in mibs]
    if rank > 0:
        work = dist.isend(tensors[rank - 1], 0)
        assert work is not None
        if rank <= num_whole:
            work.wait()
        _die_when_the_ring_is_full(store, rank)
    _compute_until_dead(store, range(1, size))
    outcomes = []
    for peer, sent in enumerate(tensors, start=1):
        got = torch.empty_like(sent)

        def receive(peer: int = peer, got: torch.Tensor = got) -> torch.Tensor:
            dist.recv(got, peer)
            return got

        outcomes.append(_outcome(receive, sent))
    return outcomes


@pytest.mark.parametrize("way", WAYS)
def test_late_receive_of_the_backend_gets_what_is_whole_or_an_error(way: str) -> None:
    # Slots hold eight times as much as a ring.
    whole = (*WHOLE_MIB, *HALF_MIB[:2]) if way == "slots" else WHOLE_MIB
    half = tuple(mib for mib in HALF_MIB if mib not in whole)
    mibs = (*whole, *half)
    args = (mibs, len(whole))
    env = {**os.environ, **WAYS[way]}
    outcomes = run_ranks(1 + len(mibs), _receive_late_by_backend, *args, timeout_s=60, env=env)
    kind, results = outcomes[0]
    assert kind == "ok", results
    assert outcomes[1:] == [("died", -signal.SIGKILL)] * len(mibs)
    assert results[: len(whole)] == ["whole"] * len(whole)
    for rank, text in enumerate(results[len(whole) :], start=1 + len(whole)):
        assert f"rank {rank} is lost: " in text
        assert not text.startswith("after")


def _receive_late_by_links(rank: int, size: int, store_path: str, mib: int) -> Any:
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=30)
    links.begin_step(1)
    sent = _numbers(mib)
    if rank == 1:
        links.send(0, [sent], direction="backward", microbatch=0, codec=Codec("raw"))
        _die_when_the_ring_is_full(store, rank)
    _compute_until_dead(store, [1])

    def receive() -> torch.Tensor:
        (got,) = links.receive(1, direction="backward", microbatch=0).wait()
        assert got is not None
        return got

    first, second = (_outcome(receive, sent) for _ in range(2))
    links.close()
    return first, second


@pytest.mark.parametrize("way", WAYS)
def test_late_receive_of_the_engine_ends_and_so_does_the_next(way: str) -> None:
    env = {**os.environ, **WAYS[way]}
    kind, outcome = run_ranks(2, _receive_late_by_links, 64, timeout_s=60, env=env)[0]
    assert kind == "ok", outcome
    for text in outcome:
        assert "rank 1 is lost: " in text
        assert not text.startswith("after")
