"""Modules for the tests of split backwards: each with what is put in, and which weights wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipecomm.app.gpt import GptConfig, GptStage

WIDTH = 6


@dataclass(frozen=True)
class Case:
    """`early`: the parameters whose gradient does not wait for W; all of them: ("*",)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    early: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Chain(nn.Module):
    """`function(self, *inputs)` over named parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class OwnLinear(torch.autograd.Function):
    """Both gradients whenever it is asked for one, as extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, requires_grad=True),)


def not_contiguous() -> tuple[Tensor, ...]:
    x = torch.randn(WIDTH, 3, 4, requires_grad=True)
    return (x,)


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, 9, (4, 5)),)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear(bias=False))


def frozen() -> nn.Module:
    module = nn.Sequential(linear(), linear(), linear())
    module[0].requires_grad_(False)
    module[1].bias.requires_grad_(False)
    return module


def tied() -> nn.Module:
    head, embedding = nn.Linear(WIDTH, 9, bias=False), nn.Embedding(9, WIDTH)
    head.weight = embedding.weight
    return Chain(lambda s, x: s.head(s.body(s.embedding(x))), embedding=embedding, body=mlp(),
                 head=head)  # fmt: skip


def recomputed(reentrant: bool) -> Callable[[], nn.Module]:
    def run(self: Any, x: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.after(checkpoint(self.inner, x, use_reentrant=reentrant))

    return lambda: Chain(run, inner=mlp(), after=linear())


def under_autocast() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.convolution(self.inner(x))
        return y

    return Chain(run, inner=mlp(), convolution=nn.Conv1d(5, 5, 3))


def gpt(stage: int) -> Callable[[], nn.Module]:
    return lambda: GptStage(GptConfig(2, 8, 2, 5), stage, 2, seed=1)


def shared(bias: bool) -> Callable[[], nn.Module]:
    def run(self: Any, x: Tensor) -> Any:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    return lambda: Chain(run, layer=linear(bias))


def functions() -> nn.Module:
    """One layer that can wait beside weights that cannot."""
    return Chain(
        lambda s, x: s.layer(OwnLinear.apply(x, s.own)) + F.linear(x, s.plain) * s.scale,
        layer=linear(), own=nn.Parameter(torch.randn(WIDTH, WIDTH)),
        plain=nn.Parameter(torch.randn(WIDTH, WIDTH)), scale=nn.Parameter(torch.randn(WIDTH)),
    )  # fmt: skip


def used_as_function() -> nn.Module:
    """The weight of a layer that waits, used by a function too."""
    return Chain(lambda s, x: F.linear(s.layer(x), s.layer.weight), layer=linear())


def compiled_part() -> nn.Module:
    return Chain(lambda s, x: s.layer(s.inner(x)), layer=linear(),
                 inner=torch.compile(linear(), backend="aot_eager"))  # fmt: skip


def parametrized() -> nn.Module:
    return nn.Sequential(linear(), parametrizations.weight_norm(linear()))


LINEARS = ("0.weight", "0.bias")
CASES: dict[str, Case] = {
    "mlp": Case(mlp, floats(4, WIDTH), ("2.weight", "2.bias")),
    "mlp of sequences": Case(mlp, floats(4, 3, WIDTH), ("2.weight", "2.bias")),
    "mlp of transposed inputs": Case(
        lambda: Chain(lambda s, x: s.inner(x.permute(1, 2, 0)), inner=mlp()),
        not_contiguous,
        ("inner.2.weight", "inner.2.bias"),
    ),
    "one row": Case(mlp, floats(1, WIDTH), ("2.weight", "2.bias")),
    "a vector": Case(linear, floats(WIDTH), ("*",)),
    "no rows": Case(linear, floats(0, WIDTH)),
    "first stage": Case(mlp, lambda: (torch.randn(4, WIDTH),), ("2.weight", "2.bias")),
    "frozen": Case(frozen, floats(4, WIDTH), ("1.weight",)),
    "shared": Case(shared(False), floats(4, WIDTH)),
    "shared with bias": Case(shared(True), floats(4, WIDTH)),
    "tied": Case(tied, ids, ("body.2.weight", "body.2.bias")),
    "used as function": Case(used_as_function, floats(4, WIDTH), ("layer.weight",)),
    "functions": Case(functions, floats(4, WIDTH), ("own", "plain", "scale")),
    "two outputs": Case(
        lambda: Chain(lambda s, x: (s.a(x), s.b(s.a(x)), x), a=linear(), b=linear()),
        floats(4, WIDTH),
    ),
    "two inputs": Case(
        lambda: Chain(lambda s, x, y: (s.a(x) + s.b(y), s.b(y)), a=linear(), b=linear(False)),
        lambda: (*floats(4, WIDTH)(), *floats(4, WIDTH)()),
    ),
    "recomputed": Case(recomputed(False), floats(4, WIDTH), ("inner.2.weight", "inner.2.bias")),
    "recomputed, reentrant": Case(
        recomputed(True), floats(4, WIDTH), ("inner.2.weight", "inner.2.bias")
    ),
    "compiled part": Case(
        compiled_part, floats(4, WIDTH), ("inner._orig_mod.weight", "inner._orig_mod.bias")
    ),
    "compiled": Case(
        lambda: torch.compile(mlp(), backend="aot_eager"),  # type: ignore[return-value]
        floats(4, WIDTH),
        ("*",),
    ),
    "autocast": Case(under_autocast, floats(4, 5, WIDTH), ("inner.2.weight", "inner.2.bias")),
    "double": Case(lambda: mlp().double(), lambda: (torch.randn(4, WIDTH).double(),),
                   ("2.weight", "2.bias")),
    "parametrized": Case(
        parametrized, floats(4, WIDTH),
        ("1.bias", "1.parametrizations.weight.original0", "1.parametrizations.weight.original1"),
    ),
    "convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(),
                              nn.Conv2d(4, 4, 2, groups=2, bias=False)),
        floats(2, 2, 7, 7),
    ),
    "convolutions in 1 and 3 dimensions": Case(
        lambda: Chain(lambda s, x: s.b(s.a(x)[:, :, None, None]), a=nn.Conv1d(2, 3, 2, dilation=2),
                      b=nn.Conv3d(3, 2, 1)),
        floats(2, 2, 7),
    ),
    "padded otherwise": Case(
        lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
                              nn.Conv1d(2, 2, 3, padding="same")),
        floats(2, 2, 7),
        ("*",),
    ),
    "embedding": Case(lambda: nn.Embedding(9, WIDTH, padding_idx=2, scale_grad_by_freq=True), ids),
    "sparse embedding": Case(lambda: nn.Embedding(9, WIDTH, max_norm=1.0), ids, ("*",)),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
        floats(2, 3, WIDTH),
        ("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight",
         "self_attn.out_proj.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
    ),
    "gpt, first": Case(gpt(0), ids, ("blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight",
                                     "blocks.0.attention_norm.bias", "blocks.0.mlp_norm.bias")),
    "gpt, last": Case(gpt(1), floats(2, 5, 8), ("blocks.0.attention_norm.weight",
        "blocks.0.mlp_norm.weight", "blocks.0.attention_norm.bias", "blocks.0.mlp_norm.bias",
        "head.norm.weight", "head.norm.bias")),
}  # fmt: skip
