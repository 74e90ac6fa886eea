"""The rules of asynchronous training, written down in one process: no schedule, no versions kept.

Each function trains copies of the stages on microbatches one after the other, and gives the
weights after the last. Stage k of P has seen max(0, i - (P-1-k)) updates when it computes the
forward of microbatch i in 1F1B; what a rule makes of that is all there is to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Parameters by name, of one stage.
Values = dict[str, Tensor]
Gradients = list[list[Tensor]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
# (gradients of one stage, its newest values, those it computed with, stage, version) -> gradients.
Change = Callable[[list[Tensor], list[Tensor], list[Tensor], int, int], list[Tensor]]


class Trainer:
    """Copies of the stages, an optimizer for each, and the values after each update."""

    def __init__(self, stages: Sequence[nn.Module], make: MakeOptimizer) -> None:
        self.stages = [copy.deepcopy(stage) for stage in stages]
        self.optimizers = [make(stage.parameters()) for stage in self.stages]
        self.history = [[self._values(stage)] for stage in self.stages]

    @staticmethod
    def _values(stage: nn.Module) -> Values:
        return {name: p.detach().clone() for name, p in stage.named_parameters()}

    def gradients(
        self, versions: Sequence[int], x: Tensor, target: Tensor, weight: float = 1.0
    ) -> Gradients:
        """Of one microbatch's weighted loss, each stage with the version that is given for it."""
        chosen = [h[v] for h, v in zip(self.history, versions, strict=True)]
        values = [{n: p.clone().requires_grad_() for n, p in one.items()} for one in chosen]
        for stage, weights in zip(self.stages, values, strict=True):
            x = functional_call(stage, weights, (x,))
        (nn.functional.mse_loss(x, target) * weight).backward()
        return [[p.grad for p in one.values() if p.grad is not None] for one in values]

    def update(
        self, gradients: Gradients, versions: Sequence[int], change: Change | None = None
    ) -> None:
        for k, (stage, found) in enumerate(zip(self.stages, gradients, strict=True)):
            newest = [p.detach().clone() for p in stage.parameters()]
            old = list(self.history[k][versions[k]].values())
            if change is not None:
                found = change(found, newest, old, k, versions[k])
            for parameter, gradient in zip(stage.parameters(), found, strict=True):
                parameter.grad = gradient.clone()
            self.optimizers[k].step()
            self.history[k].append(self._values(stage))


def pipedream(
    stages: Sequence[nn.Module], data: Any, make: MakeOptimizer, change: Change | None = None
) -> list[Values]:
    """W(t+1) = W(t) - lr g(W(t - delay)), an update for each microbatch, the delay P-1-k."""
    trainer, last = Trainer(stages, make), len(stages) - 1
    for i, (x, target) in enumerate(data):
        versions = [max(0, i - (last - k)) for k in range(len(stages))]
        trainer.update(trainer.gradients(versions, x, target), versions, change)
    return [history[-1] for history in trainer.history]


def two_versions(
    stages: Sequence[nn.Module],
    data: Any,
    make: MakeOptimizer,
    every: int,
    change: Change | None = None,
) -> list[Values]:
    """W(t+1) = W(t) - lr g(W(t-1)), an update for each batch of `every` microbatches."""
    trainer = Trainer(stages, make)
    for t in range(len(data) // every):
        versions = [max(0, t - 1)] * len(stages)
        total: Gradients | None = None
        for x, target in data[t * every : (t + 1) * every]:
            found = trainer.gradients(versions, x, target, 1 / every)
            total = found if total is None else _added(total, found)
        assert total is not None
        trainer.update(total, versions, change)
    return [history[-1] for history in trainer.history]


def newest(
    stages: Sequence[nn.Sequential], data: Any, make: MakeOptimizer, every: int
) -> list[Values]:
    """Forward of microbatch i after floor((i - (P-1-k)) / every) updates, its backward after
    floor(i / every): with whatever weights are there then. Stages are Linear and tanh."""
    trainer, last = Trainer(stages, make), len(stages) - 1
    total: Gradients | None = None
    for i, (x, target) in enumerate(data):
        inputs, outputs = [], []
        for k in range(len(stages)):
            weights = trainer.history[k][max(0, i - (last - k)) // every]
            inputs.append(x)
            x = nn.functional.linear(x, weights["0.weight"], weights["0.bias"]).tanh()
            outputs.append(x)
        y = x.requires_grad_()
        (nn.functional.mse_loss(y, target) * (1 / every)).backward()
        g, found = y.grad, []
        assert g is not None
        for k in reversed(range(len(stages))):
            g = torch.ops.aten.tanh_backward(g, outputs[k].detach())
            found.append([g.t().mm(inputs[k].detach()), g.sum(0)])
            g = g.mm(trainer.history[k][i // every]["0.weight"])
        total = found[::-1] if total is None else _added(total, found[::-1])
        if (i + 1) % every == 0:
            trainer.update(total, [i // every] * len(stages))
            total = None
    return [history[-1] for history in trainer.history]


def _added(total: Gradients, more: Gradients) -> Gradients:
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(total, more, strict=True)]
