"""Tensors whose elements are not at their address are refused by send and recv, by name."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from pipecomm.errors import TensorError
from tests.drop_in.backend_ranks import Check, failures_of, names
from tests.odd_tensors import ODD, Named

Group = dist.ProcessGroup


def _refuses(group: Group, peer: int, odd: Tensor, text: str) -> None:
    backend = group._get_backend(torch.device("cpu"))
    for call in (backend.send, backend.recv):
        with pytest.raises(TensorError, match=text):
            call([odd], peer, 0)


def _exchange(rank: int, group: Group) -> None:
    got = torch.zeros(3)
    work = dist.irecv(got, 1 - rank, group)
    dist.send(torch.full((3,), float(rank)), 1 - rank, group)
    work.wait(timedelta(seconds=10))
    assert got.tolist() == [float(1 - rank)] * 3


def what_only_stands_for_a_tensor_is_refused_and_takes_no_message(
    rank: int, size: int, group: Group
) -> None:
    for make, text in ODD.values():
        _refuses(group, 1 - rank, make(), text)
    _exchange(rank, group)


def distributed_tensor_is_refused(rank: int, size: int, group: Group) -> None:
    mesh = init_device_mesh("cpu", (size,))
    odd = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    _refuses(group, 1 - rank, odd, "__torch_dispatch__")
    _exchange(rank, group)


def tensors_of_transforms_are_refused(rank: int, size: int, group: Group) -> None:
    def look(x: Tensor) -> Tensor:
        _refuses(group, 1 - rank, x, "without memory")
        return x.sum()

    torch.func.grad(look)(torch.ones(4))
    torch.func.vmap(look)(torch.ones(4, 2))
    torch.func.functionalize(look)(torch.ones(4))
    _exchange(rank, group)


def subclass_that_leaves_dispatch_alone_is_sent_and_received(
    rank: int, size: int, group: Group
) -> None:
    got = torch.zeros(3).as_subclass(Named)
    work = dist.irecv(got, 1 - rank, group)
    dist.send(torch.full((3,), float(rank)).as_subclass(Named), 1 - rank, group)
    work.wait(timedelta(seconds=10))
    assert got.tolist() == [float(1 - rank)] * 3


def empty_tensor_over_freed_memory_is_sent(rank: int, size: int, group: Group) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    work = dist.irecv(torch.zeros(0), 1 - rank, group)
    dist.send(freed[:0], 1 - rank, group)
    work.wait(timedelta(seconds=10))
    _exchange(rank, group)


CHECKS: tuple[Check, ...] = (
    what_only_stands_for_a_tensor_is_refused_and_takes_no_message,
    distributed_tensor_is_refused,
    tensors_of_transforms_are_refused,
    subclass_that_leaves_dispatch_alone_is_sent_and_received,
    empty_tensor_over_freed_memory_is_sent,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(2, CHECKS, timeout_s=120)


@pytest.mark.parametrize("name", names(CHECKS))
def test_two_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
