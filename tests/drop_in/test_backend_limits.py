"""What a link takes before its sender waits, strict sends, and calls that make no sense."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import ConfigError, LinkTimeoutError
from tests.drop_in.backend_ranks import Check, failures_of, init, names, wait_for_all
from tests.ranks import spawn_ranks

Group = dist.ProcessGroup
SHORT = timedelta(seconds=0.3)


def negative_tag_is_refused_at_once(rank: int, size: int, group: Group) -> None:
    for call in (dist.isend, dist.irecv):
        with pytest.raises(ConfigError, match="tag of at least 0; got -1"):
            call(torch.zeros(1), 1 - rank, group, tag=-1)
    _exchange(rank, group)


def negative_timeout_is_refused_and_the_receive_stays(rank: int, size: int, group: Group) -> None:
    got = torch.zeros(1)
    receive = dist.irecv(got, 1 - rank, group)
    with pytest.raises(ConfigError, match="more than 0 s to wait for; got -5000 ms"):
        receive.wait(timedelta(seconds=-5))
    dist.send(torch.full((1,), float(rank)), 1 - rank, group)
    receive.wait()
    assert got.item() == 1 - rank


def receive_into_strides_is_refused_and_touches_nothing(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        dist.send(torch.ones(4, 4), 1, group)
        return
    whole = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="contiguous"):
        dist.recv(whole[:, ::2], 0, group)
    assert not whole.any()
    got = torch.zeros(4, 4)
    dist.recv(got, 0, group)
    assert torch.equal(got, torch.ones(4, 4))


def waiting_costs_next_to_no_cpu_time(rank: int, size: int, group: Group) -> None:
    if rank == 1:
        time.sleep(1.5)
        dist.send(torch.ones(1), 0, group)
        return
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    dist.recv(torch.zeros(1), 1, group)
    waited_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    assert waited_s > 1
    assert cpu_s < waited_s / 10


CHECKS: tuple[Check, ...] = (
    waiting_costs_next_to_no_cpu_time,
    negative_tag_is_refused_at_once,
    negative_timeout_is_refused_and_the_receive_stays,
    receive_into_strides_is_refused_and_touches_nothing,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(2, CHECKS, timeout_s=100)


@pytest.mark.parametrize("name", names(CHECKS))
def test_two_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def _exchange(rank: int, group: Group | None = None) -> None:
    """Receive posted first: allowed at any size, in any mode."""
    got = torch.zeros(8)
    receive = dist.irecv(got, 1 - rank, group)
    dist.send(torch.full((8,), float(rank)), 1 - rank, group)
    receive.wait()
    assert torch.equal(got, torch.full((8,), float(1 - rank)))


def _two_sends_first(rank: int, size: int, store_path: str, strict: str) -> str:
    """What both ranks sending a small tensor before they receive ends in."""
    os.environ["PIPECOMM_STRICT"] = strict
    init(rank, size, store_path)
    _exchange(rank)
    send = dist.isend(torch.ones(4), 1 - rank)
    try:
        send.wait(SHORT)
        dist.recv(torch.zeros(4), 1 - rank)
    except LinkTimeoutError as error:
        return str(error)
    finally:
        wait_for_all(rank, size, store_path)
    return "done"


def test_strict_mode_fails_an_order_that_works_only_by_eager_sends() -> None:
    assert spawn_ranks(2, _two_sends_first, "0") == ["done", "done"]
    for rank, text in enumerate(spawn_ranks(2, _two_sends_first, "1")):
        assert f"for rank {1 - rank} to take a message (tag 0): float32 [4]" in text


def _third_send_of_two_allowed(rank: int, size: int, store_path: str) -> None:
    os.environ["PIPECOMM_MAX_INFLIGHT"] = "2"
    init(rank, size, store_path)
    values = [torch.full((4,), float(i)) for i in range(3)]
    if rank == 0:
        sends = [dist.isend(value, 1) for value in values]
        sends[0].wait()
        sends[1].wait()
        assert not sends[2].is_completed()
        dist.barrier()
        sends[2].wait()
    else:
        dist.barrier()
        for value in values:
            got = torch.zeros(4)
            dist.recv(got, 0)
            assert torch.equal(got, value)
    dist.destroy_process_group()


def test_no_more_messages_are_in_flight_than_allowed() -> None:
    spawn_ranks(2, _third_send_of_two_allowed)


def _different_limits(rank: int, size: int, store_path: str) -> str:
    os.environ["PIPECOMM_STRICT"] = str(rank)
    with pytest.raises(Exception, match="strict") as refusal:
        init(rank, size, store_path)
    return str(refusal.value)


def test_ranks_whose_limits_differ_refuse_each_other() -> None:
    for text in spawn_ranks(2, _different_limits):
        assert "strict=True" in text
        assert "strict=False" in text
