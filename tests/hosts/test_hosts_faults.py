"""What the ranks on other hosts learn when processes and cables fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.errors import PipecommError
from pipecomm.links.link import Links
from tests.hosts.network import Hosts

RAW = Codec("raw")
# Far more than promised: a loaded machine is not a fault.
NOTICED_S = 10.0
UNPLUGGED_NOTICED_S = 30.0


def _links(rank: int, size: int, store_path: str) -> Links:
    links = Links.connect(dist.FileStore(store_path, size), rank, size, timeout_s=60)
    links.begin_step(1)
    return links


def _error_of(wait: Any) -> tuple[str, float]:
    started = time.monotonic()
    try:
        wait()
    except PipecommError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def _die_in_flight(rank: int, size: int, store_path: str) -> Any:
    links = _links(rank, size, store_path)
    large = torch.ones(8_000_000)
    if rank == 2:
        links.send(0, [large], direction="backward", microbatch=0, codec=RAW)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    peer = (rank + 1) % 2
    return _error_of(lambda: links.receive(peer, direction="forward", microbatch=0).wait())


def test_killed_rank_is_told_on_all_hosts_at_once(hosts: Hosts) -> None:
    outcomes = hosts.run([0, 1, 2], _die_in_flight)
    assert outcomes[2] == ("died", -signal.SIGKILL)
    for kind, value in outcomes[:2]:
        assert kind == "ok", value
        text, seconds = value
        assert text.startswith("PeerLostError: rank 2 is lost")
        assert seconds < NOTICED_S


def _pause(rank: int, size: int, store_path: str) -> float:
    links = _links(rank, size, store_path)
    large = torch.ones(4_000_000)
    if rank == 1:
        pid = torch.tensor([os.getpid()])
        links.send(0, [pid], direction="backward", microbatch=0, codec=RAW)
        (got,) = links.receive(0, direction="forward", microbatch=0).wait()
        assert got is not None
        assert bool((got == 1).all())
        return 0.0
    (pid_there,) = links.receive(1, direction="backward", microbatch=0).wait()
    assert pid_there is not None
    paused = psutil.Process(int(pid_there))
    paused.suspend()
    threading.Timer(5.0, paused.resume).start()
    started = time.monotonic()
    # More than all buffers on the way hold.
    links.send(1, [large], direction="forward", microbatch=0, codec=RAW).wait()
    seconds = time.monotonic() - started
    links.close()
    return seconds


def test_paused_rank_on_another_host_is_not_taken_for_dead(hosts: Hosts) -> None:
    assert hosts.spawn([0, 1], _pause)[0] > 4


def _close_after_wait(rank: int, size: int, store_path: str) -> Any:
    links = _links(rank, size, store_path)
    numbers = torch.arange(900_000.0)
    if rank == 0:
        links.send(1, [numbers], direction="forward", microbatch=0, codec=RAW).wait()
        links.close()
        os._exit(0)
    time.sleep(1.0)
    (got,) = links.receive(0, direction="forward", microbatch=0).wait()
    assert got is not None
    gone = _error_of(lambda: links.receive(0, direction="forward", microbatch=1).wait())[0]
    return torch.equal(got, numbers), gone


def test_message_of_a_sender_that_closes_after_wait_arrives(hosts: Hosts) -> None:
    hosts.shape(0, "200mbit")
    outcome = hosts.run([0, 1], _close_after_wait)[1]
    assert outcome[0] == "ok", outcome
    is_equal, gone = outcome[1]
    assert is_equal
    assert "rank 0 has left" in gone


def _lose_cable(rank: int, size: int, store_path: str, unplugged: str) -> tuple[str, float]:
    links = _links(rank, size, store_path)
    others = [peer for peer in range(size) if peer != rank]
    for peer in others:
        links.send(peer, [torch.ones(4)], direction="forward", microbatch=0, codec=RAW)
    for peer in others:
        links.receive(peer, direction="forward", microbatch=0).wait()
    Path(f"{unplugged}.ready{rank}").touch()
    while not Path(unplugged).exists():
        time.sleep(0.01)
    if rank == 0:  # one direction is busy when it happens, the others are idle
        links.send(2, [torch.ones(4000)], direction="forward", microbatch=1, codec=RAW)
    peer = (rank + 1) % size
    return _error_of(lambda: links.receive(peer, direction="forward", microbatch=1).wait())


def test_unplugged_host_is_told_on_every_rank(hosts: Hosts, tmp_path: Path) -> None:
    unplugged = tmp_path / "unplugged"

    def unplug() -> None:
        while len(list(tmp_path.glob("*.ready*"))) < 3:
            time.sleep(0.05)
        hosts.set_cable(2, is_plugged=False)
        unplugged.touch()

    threading.Thread(target=unplug, daemon=True).start()
    try:
        outcomes = hosts.spawn([0, 1, 2], _lose_cable, str(unplugged), timeout_s=90)
    finally:
        hosts.set_cable(2, is_plugged=True)
    for rank, (text, seconds) in enumerate(outcomes):
        assert text.startswith("PeerLostError"), text
        assert "rank 2 is lost" in text or rank == 2
        assert seconds < UNPLUGGED_NOTICED_S
