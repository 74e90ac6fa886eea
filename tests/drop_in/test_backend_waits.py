"""What a blocked call allows and how its wait ends: threads, timeouts, Ctrl-C (docs/drop_in.md)."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import LinkTimeoutError, TransportError
from tests.drop_in.backend_ranks import Check, failures_of, names

Group = dist.ProcessGroup


def other_threads_run_while_a_receive_waits(rank: int, size: int, group: Group) -> None:
    if rank == 1:
        dist.barrier(group)
        dist.send(torch.ones(1), 0, group)
        return
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.005):
            ticks += 1
            if ticks == 50:
                dist.barrier(group)

    thread = threading.Thread(target=count)
    thread.start()
    dist.recv(torch.zeros(1), 1, group)
    stop.set()
    thread.join(10)
    assert ticks >= 50


def several_threads_use_a_group_at_once(rank: int, size: int, group: Group) -> None:
    """Each thread sends and receives with a tag of its own, in sizes from a byte to a MiB."""

    def exchange(tag: int) -> int:
        peer = 1 - rank
        for index in range(200):
            sent = torch.full((1 << (index * 7 + tag) % 21,), index % 100 + tag, dtype=torch.uint8)
            got = torch.zeros_like(sent)
            work = dist.isend(sent, peer, group, tag)
            dist.recv(got, peer, group, tag)
            work.wait()
            if not torch.equal(got, sent):
                return index
        return -1

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(exchange, range(4))) == [-1] * 4


def wait_raises_after_the_time_given_to_it(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(LinkTimeoutError):
            dist.irecv(torch.zeros(1), 1, group).wait(timedelta(seconds=0.5))
        assert 0.5 <= time.monotonic() - start < 3
    dist.barrier(group)


def timeout_set_later_on_the_group_holds(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        group.set_timeout(timedelta(seconds=0.5))
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            dist.recv(torch.zeros(1), 1, group)
        assert 0.5 <= time.monotonic() - start < 3
        group.set_timeout(timedelta(seconds=10))
    dist.barrier(group)


def first_collective_that_a_rank_misses_says_so(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        group.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(TransportError) as caught:
            dist.barrier(group)
        text = str(caught.value)
        assert text.startswith("expected all 2 ranks at the group's first collective within its")
        assert re.search(r"0\.5 s; got, from gloo: .*; where: rank 0;", text), text
        dist.send(torch.ones(1), 1, group)
    else:
        dist.recv(torch.zeros(1), 0, group)


def first_collective_waits_no_longer_than_its_own_timeout(
    rank: int, size: int, group: Group
) -> None:
    own = timedelta(seconds=0.5)
    calls = (
        lambda new: new.barrier(timeout=own).wait(),
        lambda new: new.allreduce(torch.ones(1), timeout=own).wait(),
        lambda new: new.broadcast(torch.ones(1), root=0, timeout=own).wait(),
        lambda new: dist.irecv(torch.ones(1), 1, new).wait(own),
    )
    for call in calls:
        new = dist.new_group(backend="pipecomm")
        if rank == 0:
            start = time.monotonic()
            with pytest.raises((TransportError, LinkTimeoutError), match=r"0\.5"):
                call(new)
            assert time.monotonic() - start < 3
        dist.barrier(group)
        dist.destroy_process_group(new)


def later_collectives_wait_as_long_as_the_group(rank: int, size: int, group: Group) -> None:
    group.barrier(timeout=timedelta(seconds=3)).wait()
    if rank == 1:
        time.sleep(4)
    group.barrier().wait()


def timeout_text_says_who_waited_for_whom(rank: int, size: int, group: Group) -> None:
    if rank == 1:
        with pytest.raises(LinkTimeoutError) as caught:
            dist.irecv(torch.zeros(5), 0, group, tag=9).wait(timedelta(seconds=0.25))
        text = str(caught.value)
        for pattern in (r"rank 1\b", r"(rank|peer) 0\b", r"tag[ =]9\b", r"\b20\b", r"0\.25"):
            assert re.search(pattern, text), text
    dist.barrier(group)


def message_after_a_timeout_goes_to_the_next_receive(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        dist.barrier(group)
        for value in (1.0, 2.0):
            dist.send(torch.full((4,), value), 1, group)
        return
    first = torch.full((4,), -1.0)
    work = dist.irecv(first, 0, group)
    with pytest.raises(LinkTimeoutError):
        work.wait(timedelta(seconds=0.25))
    dist.barrier(group)
    for value in (1.0, 2.0):
        got = torch.zeros(4)
        dist.recv(got, 0, group)
        assert got.tolist() == [value] * 4
    assert first.tolist() == [-1.0] * 4
    with pytest.raises(LinkTimeoutError):
        work.wait()


def interrupt_ends_a_blocking_receive(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.zeros(1), 1, group)
        assert time.monotonic() - start < 3
    dist.barrier(group)


CHECKS: tuple[Check, ...] = (
    other_threads_run_while_a_receive_waits,
    several_threads_use_a_group_at_once,
    wait_raises_after_the_time_given_to_it,
    timeout_set_later_on_the_group_holds,
    first_collective_that_a_rank_misses_says_so,
    first_collective_waits_no_longer_than_its_own_timeout,
    later_collectives_wait_as_long_as_the_group,
    timeout_text_says_who_waited_for_whom,
    message_after_a_timeout_goes_to_the_next_receive,
    interrupt_ends_a_blocking_receive,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(2, CHECKS, timeout_s=150)


@pytest.mark.parametrize("name", names(CHECKS))
def test_two_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
