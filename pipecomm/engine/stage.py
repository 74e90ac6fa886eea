"""One stage: runs its module forward and backward and holds what a microbatch needs in between.

Knows nothing of other ranks. Of a forward's outputs only the gradient edges stay, so an output's
memory is free once it has been sent; of its inputs, the leaves that will receive a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecomm.addressable import ADVICE, why_not_addressable
from pipecomm.engine.data_parallel import DeferredReduction

__all__ = ["Head", "Stage", "boundary_tensors", "warm_up_backward"]

# What the last stage does with its module's output: (microbatch, output) -> weighted loss, if any.
Head = Callable[[int, Any], "Tensor | None"]

# Has torch's text for it, as the unsplit model would raise it.
_NOTHING_TO_TRAIN = (
    "expected a loss that requires a gradient; got one that does not require grad and does not "
    "have a grad_fn. Is it, or what it is made from, detached or computed without autograd, or is "
    "every parameter frozen? A microbatch with nothing to learn from has output.sum() * 0 as loss"
)


@dataclass(frozen=True)
class _Kept:
    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    # Of the outputs behind the edges.
    devices: tuple[torch.device, ...]
    # As DeferredReduction.roots gives them.
    roots: tuple[Tensor, ...]


class Stage:
    """`module` as stage `index` of `num_stages`."""

    def __init__(self, module: nn.Module, index: int, num_stages: int) -> None:
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self._kept: dict[int, _Kept] = {}
        self._reduction = DeferredReduction(module)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forwards and backwards of one step: training if autograd is on.

        Whatever the block raises, nothing of it is left for the next step.
        """
        if torch.is_grad_enabled():
            self._reduction.begin()
        try:
            yield
        except BaseException:
            self._reduction.give_up()
            raise
        finally:
            self.forget()

    def forward(
        self, microbatch: int, inputs: Sequence[Any], kwargs: Mapping[str, Any], head: Head
    ) -> tuple[Tensor, ...]:
        """Run the module; return the tensors for the next stage, none on the last.

        Keeps what backward() needs if autograd is on. Raises TypeError for an output that cannot
        travel, RuntimeError for a loss that no backward pass can start from.
        """
        trains = torch.is_grad_enabled()
        output = self.module(*inputs, **kwargs)
        if self.is_last:
            loss = head(microbatch, output)
            results: tuple[Tensor, ...] = () if loss is None else (loss,)
        else:
            results = boundary_tensors(output, self.index)
        if not trains:
            return () if self.is_last else tuple(tensor.detach() for tensor in results)
        if self.is_last and not any(loss.requires_grad for loss in results):
            raise RuntimeError(_NOTHING_TO_TRAIN)
        received = () if self.is_first else tuple(inputs)
        differentiable = [tensor for tensor in results if tensor.requires_grad]
        self._kept[microbatch] = _Kept(
            leaves=tuple(tensor for tensor in received if tensor.requires_grad),
            edges=tuple(get_gradient_edge(tensor) for tensor in differentiable),
            devices=tuple(tensor.device for tensor in differentiable),
            roots=self._reduction.roots(differentiable),
        )
        return () if self.is_last else results

    def num_gradients(self, microbatch: int) -> int:
        """How many gradients the next stage will send; 0 as long as the forward has not run."""
        kept = self._kept.get(microbatch)
        return 0 if kept is None or self.is_last else len(kept.edges)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, ends_step: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass; return a gradient, or None, for each input that requires one.

        `gradients` has one entry per output that requires a gradient; on the last stage the loss
        starts the pass and `gradients` is empty. With the pass that `ends_step`, the last one of
        it, data-parallel wrappers reduce.
        """
        kept = self._kept.pop(microbatch)
        starts = [None] * len(kept.edges) if self.is_last else gradients
        pairs = [
            (edge, None if gradient is None else gradient.to(device))
            for edge, gradient, device in zip(kept.edges, starts, kept.devices, strict=True)
            if gradient is not None or self.is_last
        ]
        with self._reduction.last_backward(kept.roots) if ends_step else nullcontext():
            if pairs:
                edges, values = zip(*pairs, strict=True)
                torch.autograd.backward(edges, values)
        return tuple(leaf.grad for leaf in kept.leaves)

    def forget(self) -> None:
        """Drop whatever is left of unfinished microbatches."""
        self._kept.clear()


def warm_up_backward() -> None:
    """Make torch import now what backward passes from given gradients need, over a second of it.

    In the first step the other ranks would have to wait for it.
    """
    with torch.enable_grad():
        torch.autograd.backward([torch.zeros(1, requires_grad=True) * 1], [torch.ones(1)])


def boundary_tensors(output: Any, stage_index: int) -> tuple[Tensor, ...]:
    """A stage's output as the tuple of tensors that travels; TypeError for anything else."""
    items = output if isinstance(output, (tuple, list)) else (output,)
    if not items:
        raise TypeError(_refusal(stage_index, "nothing"))
    for position, item in enumerate(items):
        where = "" if items is not output else f" at position {position}"
        if not isinstance(item, Tensor):
            raise TypeError(_refusal(stage_index, f"{type(item).__name__}{where}"))
        refused = why_not_addressable(item)
        if refused is not None:
            raise TypeError(_refusal(stage_index, f"{refused}{where}"))
    return tuple(items)


def _refusal(stage_index: int, got: str) -> str:
    return (
        f"expected a tensor or a tuple of tensors from stage {stage_index}; got {got}. Only dense "
        f"tensors travel between stages: {ADVICE}; or pass the value to every stage with kwargs"
    )
