"""The layers whose weight gradients can wait: what they keep for later, and what they make of it.

Knows one call of one layer at a time, nothing of stages and microbatches. Each formula is the one
that torch's own backward of the layer uses, in the same order, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["LAYERS", "KeptCall", "LateLayer", "late_layer"]

_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


class LateLayer:
    """One layer. `kinds` are the classes whose forward it stands in for."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = ()

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def parameters(self) -> tuple[Any, Any]:
        """Weight and bias where they are parameters of the module; by the way that costs least."""
        own = self.module.__dict__["_parameters"]
        return own.get("weight"), own.get("bias")

    def takes(self, x: Tensor) -> bool:
        """Whether this call is one that the formulas below are for."""
        raise NotImplementedError

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor | None:
        raise NotImplementedError

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the weight and of the bias, if there is one."""
        raise NotImplementedError


class _Linear(LateLayer):
    kinds = (nn.Linear,)

    def takes(self, x: Tensor) -> bool:
        return x.dim() > 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As torch computes it where the weight requires a gradient, of which it sees none here.
        if x.dim() == 2:
            return functional.linear(x, weight, bias)
        if bias is None or x.is_contiguous():
            y = functional.linear(_rows(x), weight, bias)
            return y.view(*x.shape[:-1], y.shape[-1])
        y = functional.linear(_rows(x), weight)
        return y.view(*x.shape[:-1], y.shape[-1]).add_(bias)

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        rows, g = _rows(x), _rows(gradient)
        # torch makes the gradient in the order of memory that its input has.
        is_by_column = rows.stride() == (1, rows.shape[0])
        of_rows = weight.t().mm(g.t()).t() if is_by_column else g.mm(weight)
        return of_rows.reshape(x.shape)

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        g = _rows(gradient)
        return g.t().mm(_rows(x)), None if self.module.bias is None else g.sum(0)


class _Convolution(LateLayer):
    kinds = tuple(_CONVOLUTIONS)

    def takes(self, x: Tensor) -> bool:
        layer = self.module
        num_dims = len(layer.kernel_size)
        is_plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return is_plain and x.dim() == num_dims + 2

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self.module._conv_forward(x, weight, bias)
        return y

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        of_input: Tensor = self._backward(x, weight, gradient, [True, False, False])[0]
        return of_input

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = [False, True, self.module.bias is not None]
        weight = self.module.weight.detach().to(gradient.dtype)
        _, of_weight, of_bias = self._backward(x, weight, gradient, mask)
        return of_weight, of_bias

    def _backward(self, x: Tensor, weight: Tensor, gradient: Tensor, mask: list[bool]) -> Any:
        layer = self.module
        bias_sizes = None if layer.bias is None else list(layer.bias.shape)
        geometry = (layer.stride, layer.padding, layer.dilation, False, layer.output_padding)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, bias_sizes, *geometry, layer.groups, mask
        )


class _Embedding(LateLayer):
    kinds = (nn.Embedding,)

    def takes(self, x: Tensor) -> bool:
        return self.module.max_norm is None and not self.module.sparse

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = self.module
        return functional.embedding(
            x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq
        )

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
        return None

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        layer = self.module
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        return torch.ops.aten.embedding_dense_backward(
            gradient, x, layer.num_embeddings, padding, layer.scale_grad_by_freq
        ), None


LAYERS: tuple[type[LateLayer], ...] = (_Linear, _Convolution, _Embedding)


def late_layer(module: nn.Module) -> LateLayer | None:
    """`module` as a layer that can wait; None for another class, or a forward of its own."""
    if "forward" in vars(module):
        return None
    for layer in LAYERS:
        if any(type(module).forward is kind.forward for kind in layer.kinds):
            return layer(module)
    return None


@dataclass(frozen=True)
class KeptCall:
    """What one call of a layer keeps from I to W."""

    layer: LateLayer
    x: Tensor
    gradient: Tensor

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """What its weight, and its bias, get from it."""
        weight, bias = self.layer.parameters
        of_weight, of_bias = self.layer.weight_gradients(self.x, self.gradient)
        yield weight, of_weight.to(weight.dtype)
        if of_bias is not None:
            yield bias, of_bias.to(bias.dtype)


Keep = Callable[[KeptCall], None]


class LateCall(torch.autograd.Function):
    """A call of a layer with no way to its weights in the graph: its backward keeps what they need.

    `anchor` makes the result require a gradient where x does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, layer: LateLayer, keep: Keep) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.keep = layer, keep
        # As torch saves it: what changes the weight in place meanwhile is refused.
        weight, bias = layer.parameters
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return layer.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        of_input = None
        if weight is not None:
            of_input = ctx.layer.input_gradient(x, weight.to(gradient.dtype), gradient)
        # With its place in the graph, x would keep all that lies before it.
        ctx.keep(KeptCall(ctx.layer, x.detach(), gradient))
        return of_input, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
