"""The loss of one step on the last stage: one weighted term per microbatch, and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipecomm.engine.containers import find_hidden, map_leaves
from pipecomm.engine.microbatch import Microbatches
from pipecomm.errors import ConfigError

__all__ = ["LossFn", "LossRule", "Reduction", "StepLoss", "loss_weights"]

LossFn = Callable[[Any, Any], Tensor]
Reduction = Literal["mean", "sum"]


def loss_weights(
    data: Microbatches,
    reduction: Reduction,
    divisor: float | Tensor | None,
    updates: Sequence[int] = (),
) -> list[float]:
    """Factor of each microbatch's loss, so that their sum is the loss of the whole batch.

    "mean" weighs by rows, "sum" does not; `divisor` then divides all of them. With `updates`, the
    last microbatch of each, the microbatches of an update are a batch.
    """
    weights = data.weights() if reduction == "mean" else [1.0] * len(data.rows)
    if reduction == "mean":
        for first, last in zip((-1, *updates), updates, strict=False):
            total = sum(weights[first + 1 : last + 1])
            weights[first + 1 : last + 1] = [w / total for w in weights[first + 1 : last + 1]]
    if divisor is None:
        return weights
    value = float(divisor)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"expected a finite loss_divisor above 0; got {value}")
    return [weight / value for weight in weights]


class StepLoss:
    """Applies `loss_fn(output, target)`; collects the loss and, if asked, the outputs.

    Without a loss_fn there is no loss and only outputs are collected.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        targets: Sequence[Any],
        weights: Sequence[float],
        *,
        keep_outputs: bool,
        scale: float = 1.0,
        num_batches: int = 1,
    ) -> None:
        """`scale` multiplies what backward passes start from, not the loss that is reported.

        That is the mean of `num_batches` losses, whose microbatches' weights add up to 1 each.
        """
        self._loss_fn = loss_fn
        self._scale = scale
        self._num_batches = num_batches
        self._targets = targets
        self._weights = weights
        self._total: Tensor | None = None
        self._starts: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] | None = {} if keep_outputs else None

    def __call__(self, microbatch: int, output: Any) -> Tensor | None:
        """The weighted loss of this microbatch, to run backward from."""
        if self._outputs is not None:
            self._outputs[microbatch] = _detached(output)
        if self._loss_fn is None:
            return None
        loss = self._loss_fn(output, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"expected a tensor with one element from loss_fn; got {got}")
        if loss.is_complex():
            raise TypeError(f"expected a real number from loss_fn; got {loss.dtype}")
        loss = loss * self._weights[microbatch]
        if loss.requires_grad:
            self._starts[microbatch] = torch.full_like(loss, self._scale)
        value = loss.detach().reshape(()).double()
        self._total = value if self._total is None else self._total + value
        return loss

    def start_gradient(self, microbatch: int) -> Tensor:
        """What the backward pass of this microbatch begins with, for its loss; once."""
        return self._starts.pop(microbatch)

    def total(self) -> float | None:
        """Sum of the weighted losses so far, of one batch; None before the first."""
        return None if self._total is None else self._total.item() / self._num_batches

    def outputs(self) -> list[Any] | None:
        """The last stage's outputs, detached, in the order of the microbatches."""
        if self._outputs is None:
            return None
        return [self._outputs[i] for i in sorted(self._outputs)]


@dataclass(frozen=True)
class LossRule:
    """How the losses of all steps are made; `scale` holds where updates come within a step."""

    loss_fn: LossFn | None
    reduction: Reduction
    scale: float = 1.0

    def of_step(
        self,
        data: Microbatches,
        updates: Sequence[int],
        divisor: float | Tensor | None,
        *,
        is_here: bool,
        keep_outputs: bool,
    ) -> StepLoss:
        """`updates`: the last microbatch of each within the step. `is_here`: the last stage."""
        # Elsewhere no rank needs to wait for a divisor on a device.
        weights = loss_weights(data, self.reduction, divisor if is_here else None, updates)
        return StepLoss(
            self.loss_fn,
            data.targets,
            weights,
            keep_outputs=keep_outputs and is_here,
            scale=self.scale if updates else 1.0,
            num_batches=len(updates) if updates and self.reduction == "mean" else 1,
        )


def _detached(value: Any) -> Any:
    return map_leaves(_detached_leaf, value)


def _detached_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    path, tensor = find_hidden(leaf) or ("", None)
    if getattr(tensor, "requires_grad", False):
        raise TypeError(
            f"expected outputs whose tensors can be detached, for return_outputs; got "
            f"{type(leaf).__name__}, which holds one at {path}. Return a tuple or dict, or "
            f"register the class with torch.utils._pytree"
        )
    return leaf
