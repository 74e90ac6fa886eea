"""Which tensors cross between two ranks, in which layouts and dtypes, and which are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import ConfigError, MessageMismatchError, TensorError
from tests.drop_in.backend_ranks import Check

__all__ = ["LAYOUT_CHECKS", "pass_on"]

Group = dist.ProcessGroup


def _backend(group: Group) -> dist.distributed_c10d.Backend:
    return group._get_backend(torch.device("cpu"))


def pass_on(
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


def transposed_tensor_arrives_in_order(rank: int, size: int, group: Group) -> None:
    sent = torch.arange(16, dtype=torch.int32).reshape(4, 4).t()
    got = pass_on(rank, group, sent, torch.empty(4, 4, dtype=torch.int32))
    assert got is None or torch.equal(got, sent)


def column_major_tensor_arrives_in_order(rank: int, size: int, group: Group) -> None:
    sent = torch.linalg.qr(torch.arange(16.0).reshape(4, 4) + torch.eye(4))[0]
    assert not sent.is_contiguous()
    got = pass_on(rank, group, sent, torch.empty(4, 4))
    assert got is None or torch.equal(got, sent)


def lazy_negative_tensor_arrives_resolved(rank: int, size: int, group: Group) -> None:
    sent = torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag
    assert sent.is_neg()
    got = pass_on(rank, group, sent.clone() if rank == 1 else sent, torch.empty(4))
    assert got is None or got.tolist() == [-1.0, -3.0, -5.0, -7.0]


def noncontiguous_target_is_refused_and_takes_nothing(rank: int, size: int, group: Group) -> None:
    if rank == 1:
        target = torch.zeros(4, 6).t()
        with pytest.raises(TensorError, match=r"contiguous.*strides \[1, 6\]"):
            dist.irecv(target, 0, group)
        assert not target.any()
    got = pass_on(rank, group, torch.ones(6, 4), torch.zeros(6, 4))
    assert got is None or bool((got == 1).all())


def empty_tensor_does_not_shift_the_next(rank: int, size: int, group: Group) -> None:
    pass_on(rank, group, torch.empty(2, 0, 5), torch.empty(2, 0, 5))
    got = pass_on(rank, group, torch.arange(3.0), torch.zeros(3))
    assert got is None or got.tolist() == [0.0, 1.0, 2.0]


def scalar_tensor_arrives(rank: int, size: int, group: Group) -> None:
    got = pass_on(rank, group, torch.tensor(7.5), torch.tensor(0.0))
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
        got = pass_on(rank, group, sent, torch.zeros(sent.numel()).to(dtype))
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
    got = pass_on(rank, group, torch.ones(2), torch.zeros(2))
    assert got is None or got.tolist() == [1.0, 1.0]


def same_number_of_elements_in_another_shape_is_received(
    rank: int, size: int, group: Group
) -> None:
    got = pass_on(rank, group, torch.arange(12.0).reshape(2, 6), torch.zeros(3, 4))
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


LAYOUT_CHECKS: tuple[Check, ...] = (
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
)
