"""Send and receive between two ranks through torch.distributed: what docs/drop_in.md says."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import (
    ConfigError,
    LinkTimeoutError,
    MessageMismatchError,
    TensorError,
)
from tests.drop_in.backend_ranks import GROUP_TIMEOUT_S, Check, failures_of, names

_MIB = 1 << 18  # float32 values in a MiB

Group = dist.ProcessGroup


def _backend(group: Group) -> dist.distributed_c10d.Backend:
    return group._get_backend(torch.device("cpu"))


def _pass_on(
    rank: int, group: Group, sent: torch.Tensor, into: torch.Tensor, is_later: bool = False
) -> torch.Tensor | None:
    """Rank 0 sends `sent`, rank 1 receives into `into`; gives `into` on rank 1.

    The calls block, or `is_later`, and give handles that are waited for.
    """
    if is_later:
        (dist.irecv(into, 0, group) if rank else dist.isend(sent, 1, group)).wait()
    elif rank == 0:
        dist.send(sent, 1, group)
    else:
        dist.recv(into, 0, group)
    return into if rank else None


# Layout and element types


def transposed_tensor_arrives_in_order(rank: int, size: int, group: Group) -> None:
    sent = torch.arange(16, dtype=torch.int32).reshape(4, 4).t()
    got = _pass_on(rank, group, sent, torch.empty(4, 4, dtype=torch.int32))
    assert got is None or torch.equal(got, sent)


def column_major_tensor_arrives_in_order(rank: int, size: int, group: Group) -> None:
    sent = torch.linalg.qr(torch.arange(16.0).reshape(4, 4) + torch.eye(4))[0]
    assert not sent.is_contiguous()
    got = _pass_on(rank, group, sent, torch.empty(4, 4))
    assert got is None or torch.equal(got, sent)


def lazy_negative_tensor_arrives_resolved(rank: int, size: int, group: Group) -> None:
    sent = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag
    assert sent.is_neg()
    got = _pass_on(rank, group, sent.clone() if rank == 1 else sent, torch.empty(4))
    assert got is None or got.tolist() == [-1.0, -3.0, -5.0, -7.0]


def noncontiguous_target_is_refused_and_takes_nothing(rank: int, size: int, group: Group) -> None:
    if rank == 1:
        target = torch.zeros(4, 6).t()
        with pytest.raises(TensorError, match=r"contiguous.*strides \[1, 6\]"):
            dist.irecv(target, 0, group)
        assert not target.any()
    got = _pass_on(rank, group, torch.ones(6, 4), torch.zeros(6, 4))
    assert got is None or bool((got == 1).all())


def empty_tensor_does_not_shift_the_next(rank: int, size: int, group: Group) -> None:
    _pass_on(rank, group, torch.empty(2, 0, 5), torch.empty(2, 0, 5))
    got = _pass_on(rank, group, torch.arange(3.0), torch.zeros(3))
    assert got is None or got.tolist() == [0.0, 1.0, 2.0]


def scalar_tensor_arrives(rank: int, size: int, group: Group) -> None:
    got = _pass_on(rank, group, torch.tensor(7.5), torch.tensor(0.0))
    assert got is None or (got.item() == 7.5 and got.shape == ())


def every_dtype_arrives_bit_for_bit(rank: int, size: int, group: Group) -> None:
    dtypes = (
        "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    )
    dtypes += "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    dtypes += "float8_e8m0fnu"
    for name in dtypes.split():
        dtype = getattr(torch, name)
        count = 2 if dtype == torch.bool else 256
        patterns = torch.arange(count * 16 * 16, dtype=torch.int64) % count
        sent = patterns.to(torch.uint8).view(dtype)
        got = _pass_on(rank, group, sent, torch.zeros(sent.numel()).to(dtype))
        assert got is None or torch.equal(got.view(torch.uint8), sent.view(torch.uint8)), name


# What has to match


def larger_target_raises_on_the_receiver_with_both_sizes(
    rank: int, size: int, group: Group
) -> None:
    _mismatch(rank, group, torch.ones(3), torch.full((4,), 5.0), "12", "16")


def smaller_target_raises_on_the_receiver_with_both_sizes(
    rank: int, size: int, group: Group
) -> None:
    _mismatch(rank, group, torch.ones(4), torch.full((3,), 5.0), "16", "12")


def other_dtype_of_the_same_size_raises_naming_both(rank: int, size: int, group: Group) -> None:
    target = torch.full((4,), 5, dtype=torch.int32)
    _mismatch(rank, group, torch.ones(4), target, "float32", "int32")
    target = torch.full((16,), 5.0, dtype=torch.float16)
    _mismatch(rank, group, torch.ones(8), target, "float32", "float16")


def _mismatch(rank: int, group: Group, sent: torch.Tensor, into: torch.Tensor, *words: str) -> None:
    """The receive raises, touches nothing, and the message after it is received as usual."""
    if rank == 0:
        dist.isend(sent, 1, group)
    else:
        before = into.clone()
        with pytest.raises(MessageMismatchError) as caught:
            dist.recv(into, 0, group)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert torch.equal(into, before)
    got = _pass_on(rank, group, torch.ones(2), torch.zeros(2))
    assert got is None or got.tolist() == [1.0, 1.0]


def same_number_of_elements_in_another_shape_is_received(
    rank: int, size: int, group: Group
) -> None:
    got = _pass_on(rank, group, torch.arange(12.0).reshape(2, 6), torch.zeros(3, 4))
    assert got is None or torch.equal(got, torch.arange(12.0).reshape(3, 4))


def sending_to_oneself_is_a_value_error(rank: int, size: int, group: Group) -> None:
    for call in (dist.isend, dist.irecv):
        with pytest.raises(ValueError, match="rank"):
            call(torch.ones(1), rank, group)
    with pytest.raises(ConfigError):
        dist.isend(torch.ones(1), rank, group)


def anything_but_one_dense_cpu_tensor_is_a_tensor_error(rank: int, size: int, group: Group) -> None:
    backend, peer = _backend(group), 1 - rank
    for tensors, text in (
        ([torch.ones(1), torch.ones(1)], "exactly one tensor"),
        ([torch.ones(2, 2).to_sparse()], "dense"),
        ([torch.ones(2, device="meta")], "CPU"),
        ([torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)], "QUInt8"),
    ):
        with pytest.raises(TensorError, match=text):
            backend.send(tensors, peer, 0)
        with pytest.raises(TensorError, match=text):
            backend.recv(tensors, peer, 0)


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
            got = _pass_on(rank, group, sent, leaf, is_later)
            assert got is None or bool((got.detach() == sent.detach()).all())
        assert (leaf.is_leaf, leaf.grad_fn, leaf.requires_grad) == (True, None, True)
        with torch.inference_mode():
            got = _pass_on(rank, group, torch.full((3,), 4.0), torch.zeros(3), is_later)
            assert got is None or got.tolist() == [4.0] * 3


CHECKS: tuple[Check, ...] = (
    transposed_tensor_arrives_in_order,
    column_major_tensor_arrives_in_order,
    lazy_negative_tensor_arrives_resolved,
    noncontiguous_target_is_refused_and_takes_nothing,
    empty_tensor_does_not_shift_the_next,
    scalar_tensor_arrives,
    every_dtype_arrives_bit_for_bit,
    larger_target_raises_on_the_receiver_with_both_sizes,
    smaller_target_raises_on_the_receiver_with_both_sizes,
    other_dtype_of_the_same_size_raises_naming_both,
    same_number_of_elements_in_another_shape_is_received,
    sending_to_oneself_is_a_value_error,
    anything_but_one_dense_cpu_tensor_is_a_tensor_error,
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
