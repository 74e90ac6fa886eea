"""Which tensors have their elements at their address; no border takes a pointer of others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from pipecomm.addressable import why_not_addressable
from pipecomm.codecs.codec import Codec
from pipecomm.engine.stage import boundary_tensors
from pipecomm.errors import TensorError
from pipecomm.links.part import to_part
from tests.odd_tensors import ODD, Doubled, Named


@pytest.mark.parametrize("name", ODD)
def test_what_only_stands_for_a_tensor_is_told_by_what_it_is(name: str) -> None:
    make, text = ODD[name]
    refused = why_not_addressable(make())
    assert refused is not None
    assert text in refused


def test_tensors_of_a_transform_are_told() -> None:
    seen: list[str | None] = []

    def look(x: Tensor) -> Tensor:
        seen.append(why_not_addressable(x))
        return x.sum()

    torch.func.grad(look)(torch.ones(4))
    torch.func.vmap(look)(torch.ones(4, 2))
    torch.func.functionalize(look)(torch.ones(4))
    assert seen == ["a Tensor without memory of its own"] * 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(3)[1:],
        torch.ones(()),
        torch.empty(0, 3),
        torch.empty(0).expand(5, 0),
        torch.ones(1).expand(5),
        torch.ones(4, 4).t(),
        nn.Parameter(torch.ones(3)),
        nn.Buffer(torch.ones(3)),
        torch.ones(3).as_subclass(Named),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch._lazy_clone(torch.ones(3)),
        torch.ones(3).share_memory_(),
    ],
)
def test_what_has_its_elements_at_its_address_passes(tensor: Tensor) -> None:
    assert why_not_addressable(tensor) is None


def test_empty_tensor_over_freed_memory_passes() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert why_not_addressable(freed[:0]) is None


BORDERS: dict[str, Callable[[Any], Any]] = {
    "encode": Codec("int8").encode,
    "encode raw": Codec("raw").encode,
    "encode out": lambda odd: Codec("raw").encode(torch.ones(4), odd),
    "decode wire": lambda odd: Codec("int8").decode(odd, torch.ones(4)),
    "decode": lambda odd: Codec("int8").decode(torch.zeros(20, dtype=torch.uint8), odd),
    "send": lambda odd: to_part(odd, Codec("raw"), 0),
    "send coded": lambda odd: to_part(odd, Codec("int4"), 0),
    "stage": lambda odd: boundary_tensors((torch.ones(2), odd), 3),
}


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("name", ODD)
def test_every_border_refuses_it_with_a_type_error(name: str, border: str) -> None:
    make, text = ODD[name]
    odd = make()
    with pytest.raises(TypeError) as caught:
        BORDERS[border](odd)
    assert text in str(caught.value)
    assert border != "stage" or "from stage 3; got" in str(caught.value)
    assert border == "stage" or isinstance(caught.value, TensorError)


def test_subclass_that_leaves_dispatch_alone_travels_as_a_plain_tensor() -> None:
    named = torch.arange(4.0).as_subclass(Named)
    part, _ = to_part(named, Codec("raw"), 0)
    assert part[0] == named.data_ptr()
    assert Codec("raw").encode(named).tolist() == Codec("raw").encode(torch.arange(4.0)).tolist()


def test_operators_on_a_wrapper_are_its_own_affair() -> None:
    wire = torch.ops.pipecomm.encode(Doubled(torch.ones(4)), "raw")
    assert wire.inner.tolist() == Codec("raw").encode(torch.ones(4)).tolist()


def test_operators_take_fake_tensors() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        assert torch.ops.pipecomm.encode(torch.ones(4), "raw").shape == (16,)
