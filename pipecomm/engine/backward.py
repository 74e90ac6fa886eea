"""The backward pass of one microbatch through one stage: what it needs, and how it is run.

Knows autograd, nothing of modules, schedules and other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Backward", "warm_up_backward"]


@dataclass(frozen=True)
class Backward:
    """Of a forward's outputs only the gradient edges, so that their memory is free once sent.

    `leaves` are the inputs that require a gradient, `edges` the places in the graph of the outputs
    that do, which lie on `devices`.
    """

    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    devices: tuple[torch.device, ...]

    @classmethod
    def between(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Backward:
        """From those of `outputs` that require a gradient to those of `inputs` that do."""
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        return cls(
            leaves=tuple(tensor for tensor in inputs if tensor.requires_grad),
            edges=tuple(get_gradient_edge(tensor) for tensor in differentiable),
            devices=tuple(tensor.device for tensor in differentiable),
        )

    def run(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Add to the parameters' .grad; return a gradient, or None, for each of the leaves.

        `gradients` has one entry per edge, None for a gradient that does not exist. Once.
        """
        pairs = [
            (edge, gradient.to(device))
            for edge, gradient, device in zip(self.edges, gradients, self.devices, strict=True)
            if gradient is not None
        ]
        if pairs:
            edges, values = zip(*pairs, strict=True)
            torch.autograd.backward(edges, values)
        return tuple(leaf.grad for leaf in self.leaves)


def warm_up_backward() -> None:
    """Make torch import now what backward passes from given gradients need, over a second of it.

    In the first step the other ranks would have to wait for it.
    """
    with torch.enable_grad():
        torch.autograd.backward([torch.zeros(1, requires_grad=True) * 1], [torch.ones(1)])
