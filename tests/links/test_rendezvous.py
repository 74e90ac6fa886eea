"""A rank that cannot connect and lives on: everybody learns why, at once, and nobody waits."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipecomm
from pipecomm.links import rendezvous
from tests.ranks import spawn_ranks

# What others may need to hear of it on a busy machine, and far less than the group's timeout.
_SOON_S = 10.0
_TIMEOUT = timedelta(seconds=60)
_PATHS = {"one host": "auto", "TCP": "tcp"}
_ENOUGH = 30

Outcome = tuple[str, float]


def _limit(name: str, count: int = 0) -> None:
    """No file may grow any more ("files"), or only `count` more be opened ("descriptors")."""
    kind, value = resource.RLIMIT_FSIZE, 0
    if name == "descriptors":
        is_open = {int(number) for number in os.listdir("/proc/self/fd")}
        kind = resource.RLIMIT_NOFILE
        value = [number for number in range(4096) if number not in is_open][count]
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _unlimit() -> None:
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def _outcome(action: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        action()
        text = "done"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - start


def _init(rank: int, size: int, store: dist.Store) -> None:
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store, timeout=_TIMEOUT)


def _exchange(rank: int, size: int, count: int = 1) -> None:
    got = torch.zeros(count)
    work = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    work.wait()
    assert got[0].item() == (rank - 1) % size


def _meet(store: dist.Store, rank: int, size: int, where: str) -> None:
    store.set(f"{where}/{rank}", "")
    store.wait([f"{where}/{peer}" for peer in range(size)])


def _store(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


@pytest.fixture
def port() -> Any:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def _descriptors_run_out(
    rank: int, size: int, _: str, port: int, victim: int
) -> list[tuple[Outcome, Outcome]]:
    """A group with a few descriptors left in one rank, from none on, and its first messages."""
    store, found = _store(port), []
    for count in (*range(9), _ENOUGH):
        part = dist.PrefixStore(str(count), store)
        _meet(part, rank, size, "begin")
        if rank == victim:
            _limit("descriptors", count)
        made = _outcome(lambda part=part: _init(rank, size, part))  # type: ignore[misc]
        used = _outcome(lambda: _exchange(rank, size)) if dist.is_initialized() else made
        _unlimit()
        found.append((made, used))
        _meet(part, rank, size, "end")
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1), (3, 1)])
def test_rank_short_of_descriptors_is_named_to_all(
    size: int, victim: int, path: str, port: int
) -> None:
    env = {"PIPECOMM_TRANSPORT": _PATHS[path]}
    by_rank = spawn_ranks(size, _descriptors_run_out, port, victim, timeout_s=100, env=env)
    for of_count in zip(*by_rank, strict=True):
        for texts in zip(*of_count, strict=True):  # of the init, of the messages
            assert all(seconds < _SOON_S for _, seconds in texts), texts
        made, used = ([text for text, _ in texts] for texts in zip(*of_count, strict=True))
        for rank in range(size):
            if set(made) != {"done"}:
                assert "RLIMIT_NOFILE is " in made[rank], made
                assert rank == victim or made[rank].startswith(
                    f"StageFailedError: rank {victim} cannot"
                ), made
            elif used[rank] != "done":
                assert "RLIMIT_NOFILE is " in used[rank], used
                assert rank == victim or f"rank {victim} is lost" in used[rank], used
    assert all(made[0] != "done" for made, _ in (of_rank[0] for of_rank in by_rank))
    assert all(used[0] == "done" for _, used in (of_rank[-1] for of_rank in by_rank))


def _files_may_not_grow(rank: int, size: int, _: str, port: int, victim: int, kind: str) -> Outcome:
    store = _store(port)
    if kind == "pipeline":
        dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    _meet(store, rank, size, "begin")
    if rank == victim:
        _limit("files")
    if kind == "pipeline":
        return _outcome(lambda: pipecomm.Pipeline(torch.nn.Linear(2, 2), timeout_s=60))
    return _outcome(lambda: _init(rank, size, store))


@pytest.mark.parametrize("kind", ["backend", "pipeline"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_whose_memory_may_not_grow_is_named_to_all(victim: int, kind: str, port: int) -> None:
    outcomes = spawn_ranks(3, _files_may_not_grow, port, victim, kind, timeout_s=90)
    for rank, (text, seconds) in enumerate(outcomes):
        assert "File too large (errno 27; RLIMIT_FSIZE is 0)" in text
        assert seconds < 3 * _SOON_S  # the first one loads, or builds, what it needs
        if rank != victim:
            assert text.startswith(f"StageFailedError: rank {victim} cannot connect: PoolExhausted")


def _no_ring(rank: int, size: int, _: str, port: int, limit: str) -> Outcome:
    store = _store(port)
    _init(rank, size, store)
    if rank == 1:
        _limit(limit)
    _meet(store, rank, size, "limited")
    outcome = _outcome(lambda: _exchange(rank, size, 1_000_000))
    _meet(store, rank, size, "end")
    return outcome


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("limit", ["files", "descriptors"])
def test_rank_that_cannot_make_or_take_a_ring_is_named_on_both_sides(
    limit: str, path: str, port: int
) -> None:
    env = {"PIPECOMM_TRANSPORT": _PATHS[path]}
    outcomes = spawn_ranks(2, _no_ring, port, limit, timeout_s=90, env=env)
    for rank, (text, seconds) in enumerate(outcomes):
        assert "RLIMIT_" in text, text
        assert "end of the link has failed" in text or "has failed here" in text, text
        assert ("rank 1 is lost: its end" in text) == (rank == 0), text
        assert seconds < _SOON_S


class _ListenerThatFails:
    """Publishes an address and then raises."""

    error: BaseException

    def __init__(self) -> None:
        self._listener = _core.Listener()
        self.address = self._listener.address

    def listen_tcp(self, host: str) -> None:
        self._listener.listen_tcp(host)
        self.address = self._listener.address

    def connect(self, *_: Any, **__: Any) -> Any:
        time.sleep(0.5)  # the others are shaking hands by now
        raise self.error


_core = rendezvous.core


def _fails_at_the_handshake(
    rank: int, size: int, _: str, port: int, error: BaseException
) -> Outcome:
    if rank == 1:
        _ListenerThatFails.error = error
        rendezvous.core = SimpleNamespace(
            Listener=_ListenerThatFails,
            is_remote=_core.is_remote,
            why_unreachable=_core.why_unreachable,
            finish_bridges=_core.finish_bridges,
        )
    return _outcome(lambda: _init(rank, size, _store(port)))


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("error", [MemoryError("none left"), KeyboardInterrupt("by hand")])
def test_rank_that_raises_at_the_handshake_is_named_to_all(
    error: BaseException, path: str, port: int
) -> None:
    env = {"PIPECOMM_TRANSPORT": _PATHS[path]}
    outcomes = spawn_ranks(3, _fails_at_the_handshake, port, error, timeout_s=90, env=env)
    said = f"{type(error).__name__}: {error}"
    for rank, (text, seconds) in enumerate(outcomes):
        assert text == (said if rank == 1 else f"StageFailedError: rank 1 cannot connect: {said}")
        assert seconds < 3 * _SOON_S


def _unusable_arguments(rank: int, size: int, _: str, port: int, kind: str) -> Outcome:
    dist.init_process_group("gloo", rank=rank, world_size=size, store=_store(port))
    if kind == "group":
        os.environ["PIPECOMM_CODEC"] = "int3" if rank == 1 else "raw"
        return _outcome(lambda: dist.new_group(backend="pipecomm", timeout=_TIMEOUT))
    wrong: dict[str, dict[str, Any]] = {"device": {"device": "meta"}, "stages": {"num_stages": 3}}
    options = wrong[kind] if rank == 1 else {}
    return _outcome(lambda: pipecomm.Pipeline(torch.nn.Linear(2, 2), timeout_s=60, **options))


@pytest.mark.parametrize("kind", ["group", "device", "stages"])
def test_rank_with_arguments_that_cannot_be_used_is_named_to_all(kind: str, port: int) -> None:
    (first, seconds), (second, _) = spawn_ranks(2, _unusable_arguments, port, kind, timeout_s=90)
    assert first.startswith("StageFailedError: rank 1 cannot")
    assert second in first
    assert seconds < 3 * _SOON_S


@pytest.mark.parametrize(("path", "per_peer"), [("one host", 1), ("TCP", 5)])
def test_group_opens_few_descriptors_for_each_peer(path: str, per_peer: int, port: int) -> None:
    env = {"PIPECOMM_TRANSPORT": _PATHS[path]}
    counts = spawn_ranks(3, _descriptors_of_a_group, port, timeout_s=90, env=env)
    assert counts == [2 * per_peer] * 3


def _descriptors_of_a_group(rank: int, size: int, _: str, port: int) -> int:
    store = _store(port)
    _init(rank, size, store)
    before = _settled_descriptors()
    group = dist.new_group(backend="pipecomm")
    for peer in range(size):
        if peer != rank:
            work = dist.isend(torch.ones(1), peer, group)
            dist.recv(torch.zeros(1), peer, group)
            work.wait()
    _meet(store, rank, size, "all has arrived")
    count = _settled_descriptors() - before
    _meet(store, rank, size, "all have counted")  # a rank that ends closes those of the others
    return count


def _settled_descriptors() -> int:
    """How many are open, once nothing has closed any in the background for half a second."""
    counts = [len(os.listdir("/proc/self/fd"))]
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1]
