"""One call of one layer: outputs, strides and gradients of torch's own, over shapes and layouts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.late_layers import LAYERS, KeptCall, LateCall, late_layer

# Columns that go in and come out; one of each is where strides are ambiguous.
SIZES = [(6, 6), (33, 7), (1, 5), (5, 1)]
LAYOUTS = ("contiguous", "reversed", "by column", "every other", "expanded")


def shapes(width: int) -> list[tuple[int, ...]]:
    return [(4, width), (1, width), (3, 5, width), (2, 3, 5, width), (1, 1, width)]


def laid_out(shape: tuple[int, ...], layout: str) -> Tensor:
    if layout == "reversed":
        return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    if layout == "by column":
        return torch.randn(shape[-1], *shape[:-1]).movedim(0, -1)
    if layout == "every other":
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return torch.randn(*shape[:-2], 1, shape[-1]).expand(shape)
    return torch.randn(shape)


def called(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """Output and gradients by the layer's own parts."""
    layer, kept = late_layer(module), []
    assert layer is not None
    assert layer.takes(x)
    anchor = None if x.requires_grad else torch.zeros((), requires_grad=True)
    y = LateCall.apply(x, anchor, layer, kept.append)  # type: ignore[no-untyped-call]
    y.backward(gradient)
    (call,) = kept
    got = dict(call.gradients())
    return [y, x.grad, *(got.get(p) for p in module.parameters())]


def expected(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor | None]:
    y = module(x)
    y.backward(gradient)
    return [y, x.grad, *(p.grad for p in module.parameters())]


def assert_same(module: nn.Module, x: Tensor, requires_grad: bool) -> None:
    same = copy.deepcopy(module)
    a, b = (x.detach().requires_grad_(requires_grad) for _ in range(2))
    gradient = torch.randn_like(module(x))
    mine, torchs = called(module, a, gradient), expected(same, b, gradient)
    for got, wanted in zip(mine, torchs, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert torch.equal(got, wanted)
    # Of the output too: what is sent keeps them.
    assert mine[0].stride() == torchs[0].stride()  # type: ignore[union-attr]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_has_torchs_bits_and_strides(layout: str, bias: bool) -> None:
    torch.manual_seed(0)
    for (width, height), requires_grad in itertools.product(SIZES, (True, False)):
        for shape in shapes(width):
            layer = nn.Linear(width, height, bias=bias)
            assert_same(layer, laid_out(shape, layout), requires_grad)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(2, 3, 2, stride=2), (2, 2, 9)),
        (nn.Conv2d(4, 6, 3, padding=(1, 2), groups=2, bias=False), (2, 4, 5, 6)),
        (nn.Conv3d(1, 2, 2, dilation=2), (1, 1, 5, 4, 3)),
    ],
    ids=["1d", "2d", "3d"],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_convolution_has_torchs_bits(module: Any, shape: Any, requires_grad: bool) -> None:
    assert_same(module, torch.randn(shape), requires_grad)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_embedding_has_torchs_bits(options: dict[str, Any]) -> None:
    assert_same(nn.Embedding(9, 4, **options), torch.randint(0, 9, (3, 20)), False)


def test_every_class_of_layers_is_tried_here() -> None:
    kinds = {kind for layer in LAYERS for kind in layer.kinds}
    assert kinds == {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Named(nn.Linear):
    """A subclass with the forward it inherits."""


def test_other_classes_and_forwards_are_none_of_them() -> None:
    assert late_layer(nn.LayerNorm(2)) is None
    assert late_layer(Doubled(2, 2)) is None
    assert late_layer(nn.ConvTranspose1d(2, 2, 2)) is None
    layer = Named(2, 2)
    assert late_layer(layer) is not None
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert late_layer(layer) is None


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(3, 3), torch.ones(3)),
        (nn.Conv1d(2, 2, 1), torch.ones(2, 4)),
        (nn.Conv1d(2, 2, 3, padding="same"), torch.ones(1, 2, 4)),
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"), torch.ones(1, 2, 4)),
        (nn.Embedding(3, 2, sparse=True), torch.ones(2, dtype=torch.int64)),
        (nn.Embedding(3, 2, max_norm=1.0), torch.ones(2, dtype=torch.int64)),
    ],
)
def test_calls_that_formulas_are_not_for_are_not_taken(module: nn.Module, x: Tensor) -> None:
    layer = late_layer(module)
    assert layer is not None
    assert not layer.takes(x)


def test_output_that_gets_no_gradient_keeps_nothing() -> None:
    layer, kept = late_layer(nn.Linear(2, 2)), []
    x = torch.ones(1, 2, requires_grad=True)
    y = LateCall.apply(x, None, layer, kept.append)  # type: ignore[no-untyped-call]
    unused = torch.autograd.grad((x * 2).sum() + 0 * y.detach().sum(), x)
    assert unused[0].tolist() == [[2.0, 2.0]]
    assert kept == []


def test_kept_call_gives_gradients_in_the_weights_dtype() -> None:
    layer = late_layer(nn.Linear(2, 2))
    assert layer is not None
    half = torch.ones(1, 2, dtype=torch.bfloat16)
    assert {g.dtype for _, g in KeptCall(layer, half, half).gradients()} == {torch.float32}
