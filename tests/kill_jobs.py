"""What ranks do while one of them is killed (tests/kills.py); each job ends with the loss it saw.

A job is fn(rank, size, store_path, start, seed): `start` tells how the ranks meet, and `seed`
decides all that is random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.codecs.codec import Codec
from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import PipecommError
from pipecomm.links.link import Links
from pipecomm.links.rendezvous import connect
from pipecomm.memory.pool import default_pool

LIMIT_S = 60.0
# Receives are posted this much later than the sends of the same round.
MAX_BUSY_S = 3.0
# Bytes of a message: far below, around and far above the ring, which takes 4 MiB.
LATE_NBYTES = (4, 100_000, 3 << 20, 4 << 20, 5 << 20, 64 << 20)


@dataclass(frozen=True)
class Start:
    """How ranks meet of which one may be killed.

    `port`: of a TCPStore that outlives them all. (In a FileStore, torch waits without an end for
    the rest of what a killed rank was writing.) `limit_s`: the time to connect in: a rank that dies
    before is missed by nobody until then. Each rank releases `connected` once it is.
    """

    port: int
    limit_s: float
    connected: Any

    def store(self) -> dist.Store:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False)

    def connect_backend(self, rank: int, size: int) -> None:
        dist.init_process_group(
            "pipecomm",
            rank=rank,
            world_size=size,
            store=self.store(),
            timeout=timedelta(seconds=self.limit_s),
        )
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=LIMIT_S))


@dataclass(frozen=True)
class Loss:
    """What ended a survivor: when, and since when it waited (time.monotonic); how far it was."""

    error: str
    at_s: float
    was_connected: bool
    waited_from_s: float = 0.0


def exchange_batches(
    rank: int,
    size: int,
    store_path: str,
    start: Start,
    seed: str,
    ends_s: float = float("inf"),
) -> Loss | None:
    """Batches of random size between all, until rank 0 says after `ends_s` that it is the last."""
    is_connected = False
    try:
        start.connect_backend(rank, size)
        is_connected = True
        start.connected.release()
        rng, end = random.Random(seed), time.monotonic() + ends_s
        is_last = False
        while not is_last:
            is_last = _exchange(rank, size, int(2 ** rng.uniform(0, 20)), time.monotonic() > end)
        dist.destroy_process_group()
    except (PipecommError, dist.DistError) as error:
        return Loss(str(error), time.monotonic(), is_connected)
    return None


def _exchange(rank: int, size: int, numel: int, is_over: bool) -> bool:
    """Each rank's own number to and from all others; True when rank 0 says that it is over."""
    peers = [peer for peer in range(size) if peer != rank]
    sent = torch.full((numel,), rank + size * is_over, dtype=torch.int32)
    got = {peer: torch.empty_like(sent) for peer in peers}
    calls = [dist.P2POp(dist.irecv, got[peer], peer) for peer in peers]
    calls += [dist.P2POp(dist.isend, sent, peer) for peer in peers]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    for peer in peers:
        if not bool((got[peer] == got[peer][0]).all()) or int(got[peer][0]) % size != peer:
            raise AssertionError(f"rank {rank} got something else from rank {peer}: {got[peer]}")
    return is_over if rank == 0 else int(got[0][0]) >= size


def train(rank: int, size: int, store_path: str, start: Start, seed: str) -> Loss:
    is_connected = False
    try:
        start.connect_backend(rank, size)
        stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        with Pipeline(
            stage, num_microbatches=8, loss_fn=nn.functional.mse_loss, timeout_s=start.limit_s
        ) as pipeline:
            is_connected = True
            start.connected.release()
            rows = torch.ones(64, 64)
            while True:
                pipeline.train_step(rows if rank == 0 else None, rows if rank == size - 1 else None)
    except (PipecommError, dist.DistError) as error:
        return Loss(str(error), time.monotonic(), is_connected)


# Sends `tensor` to a rank; gives what waits until it has left.
Send = Callable[[Tensor, int], Callable[[], Any]]
# Receives a tensor like that one from a rank.
Receive = Callable[[Tensor, int], Tensor]


def backend_late(rank: int, size: int, store_path: str, start: Start, seed: str) -> Loss:
    """Sends at once, computes, and receives then, through the backend."""

    def send(tensor: Tensor, peer: int) -> Callable[[], Any]:
        work = dist.isend(tensor, peer)
        assert work is not None
        return work.wait

    def receive(like: Tensor, peer: int) -> Tensor:
        got = torch.empty_like(like)
        dist.recv(got, peer)
        return got

    def connect_all() -> tuple[Send, Receive]:
        start.connect_backend(rank, size)
        return send, receive

    return _receive_late(rank, size, start.connected, seed, connect_all)


def engine_late(rank: int, size: int, store_path: str, start: Start, seed: str) -> Loss:
    """The same through the engine's links, where the loss of any rank ends all."""

    def connect_all() -> tuple[Send, Receive]:
        communicator = connect(
            start.store(),
            rank,
            size,
            name="late",
            timeout_s=start.limit_s,
            pool=default_pool(),
        )
        links = Links(communicator, LIMIT_S)
        links.begin_step(1)

        def send(tensor: Tensor, peer: int) -> Callable[[], Any]:
            return links.send(
                peer, [tensor], direction="forward", microbatch=1, codec=Codec("raw")
            ).wait

        def receive(like: Tensor, peer: int) -> Tensor:
            (got,) = links.receive(peer, direction="forward", microbatch=1).wait()
            assert got is not None
            return got

        return send, receive

    return _receive_late(rank, size, start.connected, seed, connect_all)


def _receive_late(
    rank: int, size: int, connected: Any, seed: str, connect_all: Callable[[], tuple[Send, Receive]]
) -> Loss:
    common, own = random.Random(seed), random.Random(f"{seed}/{rank}")
    peers = [peer for peer in range(size) if peer != rank]
    is_connected, waited_from_s = False, 0.0
    try:
        send, receive = connect_all()
        is_connected = True
        connected.release()
        while True:
            sent = torch.full((common.choice(LATE_NBYTES) // 4,), rank, dtype=torch.int32)
            waits = [send(sent, peer) for peer in peers]
            time.sleep(own.uniform(0, MAX_BUSY_S))
            waited_from_s = time.monotonic()
            for peer in own.sample(peers, len(peers)):
                got = receive(sent, peer)
                if not bool((got == peer).all()):
                    raise AssertionError(f"rank {rank} got something else from rank {peer}: {got}")
            for wait in waits:
                wait()
    except (PipecommError, dist.DistError) as error:
        return Loss(str(error), time.monotonic(), is_connected, waited_from_s)


JOBS: dict[str, Callable[..., Any]] = {
    "exchange": exchange_batches,
    "train": train,
    "backend late": backend_late,
    "engine late": engine_late,
}
# Those of which every survivor tells the others, as it ends, which rank was lost.
FAIL_TOGETHER = ("train", "engine late")
