"""Stages for the tests: modules that carry more than one tensor, keywords, views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.pipeline_cases import (
    WIDTH,
)


class Fork(nn.Module):
    """x -> (h, x): two paths for the gradient back to x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h.tanh(), h


class PassResidual(nn.Module):
    """(h, res) -> (f(h), res), the same res object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(h).tanh(), res


class AddResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, res: Tensor) -> Tensor:
        return self.linear(h) + res


class CarryMixed(nn.Module):
    """Passes ids, mask and lengths on untouched beside the activations; records what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        self.seen.append((ids, mask, lengths))
        return self.linear(x).tanh() * mask[:, 0, 0, :1, None], ids, mask, lengths


class WithAux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h, h.square().mean()


class TakeAux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux_shapes: list[tuple[int, ...]] = []

    def forward(self, h: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        self.aux_shapes.append(tuple(aux.shape))
        return self.linear(h), aux


class AddPosition(nn.Module):
    """Adds an embedding of `pos` [rows, 1]; records the rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        self.seen.append(pos[:, 0].tolist())
        return self.linear(x).tanh() + self.embedding(pos[:, 0])


class Scaled:
    """An opaque object: no tensor, no length, one method."""

    def apply(self, x: Tensor) -> Tensor:
        return x * 2


class UseObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, scaled: Scaled) -> Tensor:
        self.seen.append(scaled)
        return scaled.apply(self.linear(x))


class ViewOut(nn.Module):
    """Ends in a view of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().view(-1, 2, WIDTH)[:, 1]


def made(kind: Callable[[], nn.Module], number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(number)]


def frozen(stages: list[nn.Module], *which: int) -> list[nn.Module]:
    for index in which:
        stages[index].requires_grad_(False)
    return stages
