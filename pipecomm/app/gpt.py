"""A byte-level GPT that is built stage by stage: the split does not change any weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecomm.errors import ConfigError

__all__ = ["GptConfig", "GptStage", "byte_loss", "layers_of_stage"]

_M = TypeVar("_M", bound=nn.Module)
_NUM_BYTES = 256
# About width ** -0.5: a model of this size leaves the plateau of byte pairs several times sooner
# than with the usual 0.02.
_INIT_STD = 0.08
# Near enough to 0 that a fresh model knows little: its loss is about ln 256 = 5.55 nats per byte.
_HEAD_STD = 0.05
# Longest wavelength of the rotary positions, in bytes over 2 pi: a few lines of text.
_ROTARY_BASE = 100.0


@dataclass(frozen=True)
class GptConfig:
    """Size of the whole model, whatever the number of stages."""

    num_layers: int = 2
    width: int = 128
    num_heads: int = 4
    sequence_length: int = 128

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "sequence_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.width % (2 * self.num_heads):
            raise ConfigError(
                f"width: expected a multiple of 2 * num_heads = {2 * self.num_heads}; "
                f"got {self.width}"
            )


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Layers a stage owns: contiguous, sizes differ by one at most.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"expected at least one layer per stage; got {num_layers} layers for "
            f"{num_stages} stages"
        )
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)


class GptStage(nn.Module):
    """One stage: int64 [rows, length] (first stage) or float [rows, length, width] in; the width's
    activations, or from the last stage logits [rows, length, 256], out.

    Every layer draws its weights from `seed` and its own place, so any split gives the same model.
    """

    def __init__(self, config: GptConfig, stage: int, num_stages: int, seed: int) -> None:
        super().__init__()
        layers = layers_of_stage(config.num_layers, stage, num_stages)
        self.embedding = None
        self.head = None
        if stage == 0:
            self.embedding = _seeded(seed, 0, lambda: _Embedding(config))
        self.blocks = nn.ModuleList(_seeded(seed, 1 + k, lambda: _Block(config)) for k in layers)
        if stage == num_stages - 1:
            self.head = _seeded(seed, 1 + config.num_layers, lambda: _Head(config))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte; logits [rows, length, 256], targets [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Embedding(nn.Module):
    """Of each byte and the one before, so that the layers need not find out about pairs first."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.byte = nn.Embedding(_NUM_BYTES, config.width)
        self.byte_before = nn.Embedding(_NUM_BYTES, config.width)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x[:, :-1], (1, 0))
        result: Tensor = self.byte(x) + self.byte_before(before)
        return result


class _Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        _init_block(self, config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self._attend(self.attention_norm(x))
        x = mixed + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(mixed))))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rotated = _rotate(query), _rotate(key)
        mixed = F.scaled_dot_product_attention(*rotated, value, is_causal=True)
        result: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class _Head(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, _NUM_BYTES, bias=False)
        nn.init.normal_(self.logits.weight, std=_HEAD_STD)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def _init_block(block: _Block, num_layers: int) -> None:
    """Residual branches start smaller, so that the activations do not grow with the depth."""
    for name, parameter in block.named_parameters():
        if parameter.dim() > 1:
            shrink = (2 * num_layers) ** -0.5 if name.endswith("_out.weight") else 1.0
            nn.init.normal_(parameter, std=_INIT_STD * shrink)


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., RoFormer): x [rows, heads, length, size] with size even."""
    length, size = x.shape[-2:]
    frequency = _ROTARY_BASE ** -(torch.arange(size // 2) / (size // 2))
    angle = torch.arange(length).unsqueeze(1) * frequency
    cos, sin = angle.cos(), angle.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def _seeded(seed: int, place: int, make: Callable[[], _M]) -> _M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + place)
        return make()
