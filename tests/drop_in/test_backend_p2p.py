"""Send and receive between two ranks through torch.distributed: what docs/drop_in.md says."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import (
    LinkTimeoutError,
)
from tests.drop_in.backend_layouts import LAYOUT_CHECKS, pass_on
from tests.drop_in.backend_ranks import GROUP_TIMEOUT_S, Check, failures_of, names

_MIB = 1 << 18  # float32 values in a MiB

Group = dist.ProcessGroup


def _backend(group: Group) -> dist.distributed_c10d.Backend:
    return group._get_backend(torch.device("cpu"))


# Order and tags


def messages_match_by_tag(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        works = [dist.isend(torch.full((4,), 1.0 / tag), 1, group, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    else:
        for tag in (2, 1):
            got = torch.zeros(4)
            dist.recv(got, 0, group, tag=tag)
            assert got.tolist() == [1.0 / tag] * 4


def messages_of_one_tag_keep_their_order(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        works = [dist.isend(torch.tensor([index]), 1, group, tag=7) for index in range(100)]
        for work in works:
            work.wait()
    else:
        for index in range(100):
            got = torch.zeros(1, dtype=torch.int64)
            dist.recv(got, 0, group, tag=7)
            assert got.item() == index


def both_sides_may_send_first(rank: int, size: int, group: Group) -> None:
    got = torch.zeros(256)
    dist.send(torch.full((256,), float(rank + 1)), 1 - rank, group)
    dist.recv(got, 1 - rank, group)
    assert got.tolist() == [2.0 - rank] * 256


def large_send_waits_for_the_receiver(rank: int, size: int, group: Group) -> None:
    group.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(LinkTimeoutError, match=rf"for rank {1 - rank} to take"):
        dist.send(torch.ones(64 * _MIB), 1 - rank, group)
    group.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    dist.barrier(group)


def sends_and_receives_do_not_block_each_other(rank: int, size: int, group: Group) -> None:
    for turn in range(20):
        sent, got = torch.full((8 * _MIB,), float(turn + rank)), torch.zeros(8 * _MIB)
        send_first = turn % 2 == rank
        if send_first:
            sending, receiving = dist.isend(sent, 1 - rank, group), dist.irecv(got, 1 - rank, group)
        else:
            receiving, sending = dist.irecv(got, 1 - rank, group), dist.isend(sent, 1 - rank, group)
        receiving.wait()
        sending.wait()
        assert got[0] == got[-1] == turn + 1 - rank


# Batches


def batch_with_the_receive_first_completes(rank: int, size: int, group: Group) -> None:
    for turn in range(20):
        got, sent = torch.zeros(_MIB), torch.full((_MIB,), float(turn))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, got, 1 - rank, group),
                dist.P2POp(dist.isend, sent, 1 - rank, group),
            ]
        )
        assert len(works) == 2
        for work in works:
            work.wait()
        assert bool((got == turn).all())


def batch_of_many_operations_completes(rank: int, size: int, group: Group) -> None:
    for count, numel in ((300, 1), (7, 100_000)):
        sent = [torch.full((numel,), float(index)) for index in range(count)]
        got = [torch.empty(numel) for _ in range(count)]
        ops = [dist.P2POp(dist.isend, one, 1 - rank, group) for one in sent]
        ops += [dist.P2POp(dist.irecv, one, 1 - rank, group) for one in got]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def unmatched_receive_in_a_batch_holds_up_nothing(rank: int, size: int, group: Group) -> None:
    ops = [dist.P2POp(dist.irecv, torch.zeros(1), 1 - rank, group)]
    if rank == 0:
        ops.insert(0, dist.P2POp(dist.isend, torch.ones(1), 1, group))
    works = dist.batch_isend_irecv(ops)
    if rank == 1:
        works[0].wait()
        assert ops[0].tensor.item() == 1
    else:
        works[0].wait()
        with pytest.raises(LinkTimeoutError, match="1"):
            works[1].wait(timedelta(seconds=0.5))
    dist.barrier(group)


def object_lists_arrive_equal(rank: int, size: int, group: Group) -> None:
    objects = [{"a": 1}, None, "x" * 10**6]
    for use_batch in (False, True):
        if rank == 0:
            dist.send_object_list(objects, 1, group, use_batch=use_batch)
        else:
            got: list[object] = [None] * 3
            dist.recv_object_list(got, 0, group, use_batch=use_batch)
            assert got == objects


# Buffers and handles


def dropped_handles_and_tensors_lose_nothing(rank: int, size: int, group: Group) -> None:
    if rank == 0:
        for index in range(50):
            dist.isend(torch.full((100_000,), float(index)), 1, group, tag=index)
        others = [torch.full((100_000,), -1.0) for _ in range(60)]
        dist.barrier(group)
        assert len(others) == 60
    else:
        dist.barrier(group)
        for index in reversed(range(50)):
            got = torch.empty(100_000)
            dist.recv(got, 0, group, tag=index)
            assert bool((got == index).all())
    dist.barrier(group)


def sender_may_write_to_its_tensor_after_wait(rank: int, size: int, group: Group) -> None:
    for count in (4, 32 * _MIB):
        if rank == 0:
            sent = torch.ones(count)
            dist.isend(sent, 1, group).wait()
            sent.fill_(7)
        else:
            time.sleep(0.2)  # The sender is ahead; at any speed the receiver sees ones.
            got = torch.zeros(count)
            dist.recv(got, 0, group)
            assert bool((got == 1).all())


def handle_can_be_waited_for_twice_and_polled(rank: int, size: int, group: Group) -> None:
    got = torch.zeros(4)
    work = dist.isend(torch.ones(4), 1, group) if rank == 0 else dist.irecv(got, 0, group)
    assert work is not None
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert work.is_success()
    assert work.wait()
    assert work.wait()
    assert work.exception() is None
    assert [one.tolist() for one in work.result()] == ([] if rank == 0 else [[1.0] * 4])


def handle_can_be_waited_for_in_another_thread(rank: int, size: int, group: Group) -> None:
    got = torch.zeros(4)
    work = dist.isend(torch.ones(4), 1, group) if rank == 0 else dist.irecv(got, 0, group)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(work.wait()))
    thread.start()
    thread.join(10)
    assert done == [True]
    assert rank == 0 or got.tolist() == [1.0] * 4


def handle_has_no_future_and_says_so(rank: int, size: int, group: Group) -> None:
    work = (
        dist.isend(torch.ones(1), 1, group) if rank == 0 else dist.irecv(torch.zeros(1), 0, group)
    )
    with pytest.raises(NotImplementedError, match="wait"):
        work.get_future()
    work.wait()


def data_moves_without_entering_the_graph(rank: int, size: int, group: Group) -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    leaf = torch.zeros(2, 3, requires_grad=True)
    for is_later in (False, True):
        for sent in (weight, (weight * 2).t().reshape(3, 2).t().contiguous()):
            got = pass_on(rank, group, sent, leaf, is_later)
            assert got is None or bool((got.detach() == sent.detach()).all())
        assert (leaf.is_leaf, leaf.grad_fn, leaf.requires_grad) == (True, None, True)
        with torch.inference_mode():
            got = pass_on(rank, group, torch.full((3,), 4.0), torch.zeros(3), is_later)
            assert got is None or got.tolist() == [4.0] * 3


CHECKS: tuple[Check, ...] = (
    *LAYOUT_CHECKS,
    messages_match_by_tag,
    messages_of_one_tag_keep_their_order,
    both_sides_may_send_first,
    large_send_waits_for_the_receiver,
    sends_and_receives_do_not_block_each_other,
    batch_with_the_receive_first_completes,
    batch_of_many_operations_completes,
    unmatched_receive_in_a_batch_holds_up_nothing,
    object_lists_arrive_equal,
    dropped_handles_and_tensors_lose_nothing,
    sender_may_write_to_its_tensor_after_wait,
    handle_can_be_waited_for_twice_and_polled,
    handle_can_be_waited_for_in_another_thread,
    handle_has_no_future_and_says_so,
    data_moves_without_entering_the_graph,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(2, CHECKS, timeout_s=150)


@pytest.mark.parametrize("name", names(CHECKS))
def test_two_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
