"""Lost peers, early exits, destroy and re-init, many groups: a group from birth to death."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import PeerLostError, PipecommError, TransportError
from tests.drop_in.backend_ranks import init
from tests.patience import patient
from tests.ranks import run_ranks, spawn_ranks

_MIB = 1 << 18  # float32 values in a MiB


def killed_in_flight(rank: int, size: int, store_path: str) -> tuple[str, float]:
    init(rank, size, store_path, timeout=timedelta(minutes=30))
    peers = [peer for peer in range(size) if peer != rank]
    works = [dist.irecv(torch.zeros(64 * _MIB), peer) for peer in peers]
    works += [dist.isend(torch.ones(64 * _MIB), peer) for peer in peers if rank != 1 or peer == 0]
    if rank == 1:
        works[0].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    works.append(dist.irecv(torch.zeros(1), 1, tag=9))  # Never sent.
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        _wait_all(works)
    seconds = time.monotonic() - start
    _wait_for_others(dist.FileStore(store_path + ".met", size), size - 1)
    return str(caught.value), seconds


def _wait_for_others(store: dist.Store, count: int) -> None:
    """A survivor that ended before another one had looked would be named in its error."""
    store.add("met", 1)
    deadline = time.monotonic() + patient(30)
    while store.add("met", 0) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_all(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def test_killed_peer_fails_the_others_naming_it() -> None:
    outcomes = run_ranks(3, killed_in_flight)
    assert outcomes[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2):
        kind, value = outcomes[rank]
        assert kind == "ok", value
        text, seconds = value
        assert "rank 1" in text, text
        assert f"rank {rank}" in text, text
        assert seconds < 10


def _waits_for_a_survivor(rank: int, size: int, store_path: str) -> str:
    """Rank 2 dies; rank 0 waits for it, and dies of it; rank 1 waits for rank 0."""
    store = dist.FileStore(store_path + ".pid", size)
    store.set(str(rank), str(os.getpid()))
    init(rank, size, store_path)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(torch.zeros(1), {0: 2, 1: 0}[rank])
    except PeerLostError as error:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        _wait_for_the_end_of(int(store.get("2")))
        with pytest.raises(PeerLostError, match=r"rank 0 is lost.*also gone: rank 2"):
            dist.send(torch.zeros(1), 0)
        return str(error)
    return ""


def test_error_about_a_survivor_that_gave_up_names_the_rank_lost_first() -> None:
    kind, text = run_ranks(3, _waits_for_a_survivor)[1]
    assert kind == "ok", text
    assert "rank 0 is lost: its process ended without a goodbye; also gone: rank 2;" in text


def sender_exits(rank: int, size: int, store_path: str) -> bool:
    store = dist.FileStore(store_path + ".pid", size)
    init(rank, size, store_path)
    if rank == 0:
        store.set("pid", str(os.getpid()))
        dist.isend(torch.full((4,), 3.0), 1, tag=1).wait()
        dist.isend(torch.full((32 * _MIB,), 4.0), 1, tag=2).wait()
        return True
    small, large = torch.zeros(4), torch.zeros(32 * _MIB)
    asked_for = dist.irecv(large, 0, tag=2)
    _wait_for_the_end_of(int(store.get("pid")))
    asked_for.wait()
    dist.recv(small, 0, tag=1)
    return bool((small == 3).all()) and bool((large == 4).all())


def _wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + patient(30)
    with contextlib.suppress(FileNotFoundError):
        while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_messages_waited_for_arrive_after_the_sender_has_exited() -> None:
    assert spawn_ranks(2, sender_exits) == [True, True]


def _exchange(rank: int, value: float) -> None:
    got = torch.zeros(1000)
    work = dist.isend(torch.full((1000,), value), 1 - rank)
    dist.recv(got, 1 - rank)
    work.wait()
    assert bool((got == value).all())


def init_works_again_after_destroy(rank: int, size: int, store_path: str) -> None:
    store = dist.FileStore(store_path, size)
    for cycle in range(5):
        if cycle == 2 and rank == 1:
            time.sleep(0.5)
        dist.init_process_group(
            "pipecomm", rank=rank, world_size=size, store=dist.PrefixStore(str(cycle), store)
        )
        _exchange(rank, float(cycle))
        group = dist.group.WORLD
        dist.destroy_process_group()
    for call in (lambda: group.send([torch.ones(1)], 1 - rank, 0), group.barrier):
        with pytest.raises(TransportError):
            call()


def destroy_with_pending_operations_ends_them_on_both_sides(
    rank: int, size: int, store_path: str
) -> None:
    init(rank, size, store_path)
    target = torch.zeros(1)
    pending = [
        dist.irecv(target, 1 - rank, tag=1),
        dist.isend(torch.ones(512 * _MIB // 8), 1 - rank, tag=2),
        dist.isend(torch.ones(512 * _MIB), 1 - rank, tag=2),
    ]
    start = time.monotonic()
    if rank == 1:  # Rank 0 learns of it by its pending receive.
        dist.destroy_process_group()
    with pytest.raises(PipecommError):
        pending[0].wait()
    if rank == 0:
        dist.destroy_process_group()
    with pytest.raises(PipecommError):
        pending[2].wait()
    assert time.monotonic() - start < 10
    assert target.item() == 0


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * (
        os.sysconf("SC_PAGE_SIZE") // 1024
    )


def groups_made_and_dropped_leave_nothing_behind(rank: int, size: int, store_path: str) -> None:
    init(rank, size, store_path)
    count, seen = 80, []
    for index in range(count):
        group = dist.new_group([0, 1])
        if rank == 0:
            dist.send(torch.full((1000,), float(index)), 1, group)
        else:
            got = torch.zeros(1000)
            dist.recv(got, 0, group)
            assert got[0].item() == index
        dist.destroy_process_group(group)
        del group
        if index in (count // 4, count - 1):
            dist.barrier()
            seen.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
            seen[-1].append(_resident_kib())
    dist.destroy_process_group()
    # The inner gloo opens and closes a socket now and then.
    assert all(late <= early + 2 for early, late in zip(seen[0][:2], seen[1][:2], strict=True)), (
        seen
    )
    assert seen[1][2] - seen[0][2] < 5000


# The last one: it leaves its group open.
def exit_with_pending_operations_does_not_hang(rank: int, size: int, store_path: str) -> None:
    init(rank, size, store_path)
    dist.barrier()
    dist.irecv(torch.zeros(4), 1 - rank)
    dist.isend(torch.ones(256 * _MIB), 1 - rank, tag=5)


CHECKS = (
    init_works_again_after_destroy,
    destroy_with_pending_operations_ends_them_on_both_sides,
    groups_made_and_dropped_leave_nothing_behind,
    exit_with_pending_operations_does_not_hang,
)


def _all_checks(rank: int, size: int, store_path: str) -> dict[str, str]:
    failures: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(rank, size, f"{store_path}.{check.__name__}")
        except BaseException:
            failures[check.__name__] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return spawn_ranks(2, _all_checks, timeout_s=90)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_ranks(name: str, failures: list[dict[str, str]]) -> None:
    texts = [of_rank[name] for of_rank in failures if name in of_rank]
    assert not texts, "\n".join(texts)
