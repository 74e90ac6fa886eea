"""Tensors that cross a link arrive with their values and their dense strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomm.codecs.codec import Codec
from pipecomm.errors import TensorError
from pipecomm.links.part import to_part
from tests.links.test_link import Pair

RAW = Codec("raw")
INT8 = Codec("int8")
CHANNELS_LAST = torch.channels_last


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


DENSE: dict[str, Tensor] = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "heads": torch.randn(2, 5, 3, 8).transpose(1, 2),
    "time first": torch.randn(6, 2, 16).transpose(0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=CHANNELS_LAST),
    "channels last of one channel": torch.randn(2, 1, 4, 5).to(memory_format=CHANNELS_LAST),
    "channels last of one pixel": torch.empty(2, 3, 1, 1, memory_format=CHANNELS_LAST).fill_(1),
    "channels last of one row": torch.randn(1, 3, 4, 5).to(memory_format=CHANNELS_LAST),
    "channels last 3d": torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "integers": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "16 dimensions": torch.arange(2.0**16).view([2] * 16).permute(*reversed(range(16))),
    "empty": torch.empty(0, 3, 4, 5, memory_format=CHANNELS_LAST),
    "complex": torch.randn(3, 4, dtype=torch.complex64).t(),
    "part of a larger one": torch.randn(4, 6, 5)[1:3].transpose(1, 2),
    "as it is": torch.randn(3, 4),
}


@pytest.mark.parametrize("codec", [RAW, INT8], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_strides_survive_the_trip(pair: Pair, name: str, codec: Codec) -> None:
    sent = DENSE[name]
    (got,) = pair.forward([sent], codec)
    (row_major,) = pair.forward([sent.contiguous()], codec)
    assert got.stride() == sent.stride()
    assert torch.equal(got, row_major)
    assert codec is INT8 or torch.equal(got, sent)


@pytest.mark.parametrize(
    "sent",
    [
        torch.randn(1, 6).expand(4, 6),
        torch.randn(10, 3)[::2].t(),
        torch.randn(4, 6)[:, :3],
        torch.randn(4, 1).expand(4, 3),
        torch.randn(5).as_strided((3, 3), (1, 1)),
    ],
    ids=lambda tensor: str(tensor.stride()),
)
def test_tensor_with_gaps_or_overlaps_arrives_contiguous(pair: Pair, sent: Tensor) -> None:
    (got,) = pair.forward([sent])
    assert got.is_contiguous()
    assert torch.equal(got, sent)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), shape=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_whatever_the_order_all_views_stay_possible(
    pair: Pair, data: Any, shape: list[int]
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    sent = torch.randn(shape).permute(order)
    (got,) = pair.forward([sent])
    assert torch.equal(got, sent)
    strides = zip(sent.shape, sent.stride(), got.stride(), strict=True)
    assert all(before == after for size, before, after in strides if size > 1 and sent.numel() > 0)


def test_gradient_wishes_travel_with_permuted_tensors(pair: Pair) -> None:
    got, plain = pair.forward([torch.ones(2, 3, requires_grad=True).t(), torch.ones(2, 3).t()])
    assert got.requires_grad
    assert got.is_leaf
    assert not plain.requires_grad


@pytest.mark.parametrize("name", ["transposed", "channels last", "16 dimensions"])
def test_raw_tensor_is_sent_from_where_it_lies(name: str) -> None:
    part, kept = to_part(DENSE[name], RAW, 0)
    assert kept is not None
    assert part[0] == kept.data_ptr() == DENSE[name].data_ptr()


def test_tensor_of_17_dimensions_is_refused_before_it_is_sent(pair: Pair) -> None:
    for sent in (torch.zeros([1] * 17), torch.zeros([2, 3] + [1] * 15).transpose(0, 1)):
        with pytest.raises(TensorError, match="at most 16 dimensions; got 17"):
            pair.low.send(1, [sent], direction="forward", microbatch=0, codec=RAW)
    (got,) = pair.forward([torch.zeros([1] * 16)])
    assert got.dim() == 16


def test_65535_tensors_make_a_message_and_one_more_is_refused(pair: Pair) -> None:
    tensors = [torch.zeros(())] * 65536
    with pytest.raises(TensorError, match="1 to 65535 tensors in a message; got 65536"):
        pair.low.send(1, tensors, direction="forward", microbatch=0, codec=RAW)
    assert len(pair.forward(tensors[1:])) == 65535
