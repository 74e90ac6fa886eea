"""Codecs as torch operators: `torch.ops.pipecomm.encode`, `decode` and `through`, for graphs.

They work under torch.compile, torch.export, autograd, vmap and FakeTensor, and never change
their inputs. Autocast leaves them alone: a tensor is coded in the dtype it has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from pipecomm._native import core
from pipecomm.codecs.codec import QUANTIZABLE, Codec

__all__ = ["decode", "encode", "through"]


@torch.library.custom_op("pipecomm::encode", mutates_args=())
def encode(x: torch.Tensor, codec: str, seed: int | None = None) -> torch.Tensor:
    """`Codec(codec).encode(x, seed=seed)`, with seeds up to 2^63 - 1: 1-D uint8 on x's device."""
    return Codec(codec).encode(x, seed=seed)


@torch.library.custom_op("pipecomm::decode", mutates_args=())
def decode(
    wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: str
) -> torch.Tensor:
    """The tensor of this shape and dtype whose bytes are `wire`: contiguous, on wire's device."""
    return Codec(codec).decode(wire, wire.new_empty(shape, dtype=dtype))


@torch.library.custom_op("pipecomm::through", mutates_args=())
def _through(
    x: torch.Tensor,
    codec: str,
    grad_codec: str,
    seed: int | None = None,
    grad_seed: int | None = None,
) -> torch.Tensor:
    chosen = Codec(codec)
    wire = chosen.encode(x, seed=seed)
    return chosen.decode(wire, x.new_empty(x.shape))


def through(
    x: torch.Tensor,
    codec: str | Codec,
    grad_codec: str | Codec,
    *,
    seed: int | None = None,
    grad_seed: int | None = None,
) -> torch.Tensor:
    """What arrives on the other side of a boundary between stages, in this process.

    Forward decodes what `codec` encodes; backward does the same to the gradient with
    `grad_codec` and otherwise takes the codec for the identity (straight-through). The result is
    a new contiguous tensor of x's shape, dtype and device (a boundary keeps dense strides, and
    gives the same values). Tensors other than float32, bfloat16
    and float16 cross a boundary bit for bit: x itself is returned.

    A codec that rounds stochastically draws the same numbers in every call unless each is given
    another `seed` (`grad_seed` for the gradient), 0 to 2^63 - 1.

    Raises what `Codec.encode` raises.
    """
    if x.dtype not in QUANTIZABLE:
        return x
    # Codec() here would break a compiled graph in two.
    names = [named if isinstance(named, str) else named.name for named in (codec, grad_codec)]
    result: torch.Tensor = _through(x, *names, seed, grad_seed)
    return result


@encode.register_fake
def _encode_fake(x: torch.Tensor, codec: str, seed: int | None = None) -> torch.Tensor:
    return x.new_empty((_wire_nbytes(codec, x.shape, x.dtype),), dtype=torch.uint8)


@decode.register_fake
def _decode_fake(
    wire: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: str
) -> torch.Tensor:
    _wire_nbytes(codec, shape, dtype)
    return wire.new_empty(shape, dtype=dtype)


@_through.register_fake
def _through_fake(
    x: torch.Tensor,
    codec: str,
    grad_codec: str,
    seed: int | None = None,
    grad_seed: int | None = None,
) -> torch.Tensor:
    _wire_nbytes(codec, x.shape, x.dtype)
    return x.new_empty(x.shape)


def _wire_nbytes(codec: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """`Codec.wire_nbytes` as a formula, so that extents may be symbols of a graph."""
    chosen = Codec(codec)
    chosen.wire_nbytes((0,), dtype)  # raises for a dtype that does not fit
    if chosen.is_raw:
        return math.prod(shape) * dtype.itemsize
    group_size, code_bits, sections, alignment = _group_sizes(chosen.name)
    rows, cols = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 0 else (1, 1)
    num_groups = rows * ((cols + group_size - 1) // group_size)
    in_sections = sum(
        (nbytes * num_groups + alignment - 1) // alignment * alignment for nbytes in sections
    )
    row_codes = cols // group_size * (group_size * code_bits // 8)
    row_codes += (cols % group_size * code_bits + 7) // 8
    return in_sections + rows * row_codes


# Cached, and so not part of a traced graph.
@functools.cache
def _group_sizes(name: str) -> tuple[int, int, tuple[int, ...], int]:
    """Values of a group, bits of a code, bytes a group takes in each section before the codes,
    and what sections are padded to.
    """
    num_values, code_bits, section_nbytes, alignment = core.codec_group_sizes(name)
    return num_values, code_bits, tuple(section_nbytes), alignment


def _save_settings(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.settings = inputs


def _through_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # The way back: the codecs change places, and do so again in a second derivative.
    codec, grad_codec, seed, grad_seed = ctx.settings
    return _through(grad, grad_codec, codec, grad_seed, seed), None, None, None, None


_through.register_autograd(_through_backward, setup_context=_save_settings)


@encode.register_vmap
def _encode_vmap(info: Any, in_dims: Any, x: torch.Tensor, *settings: Any) -> tuple[Any, int]:
    return torch.stack([encode(part, *settings) for part in x.unbind(in_dims[0])]), 0


@decode.register_vmap
def _decode_vmap(info: Any, in_dims: Any, wire: torch.Tensor, *settings: Any) -> tuple[Any, int]:
    parts = wire.unbind(in_dims[0])
    return torch.stack([decode(part.contiguous(), *settings) for part in parts]), 0


@_through.register_vmap
def _through_vmap(info: Any, in_dims: Any, x: torch.Tensor, *settings: Any) -> tuple[Any, int]:
    # Groups lie along the last dimension, which the batch must not become.
    last = x.movedim(in_dims[0], 0).unsqueeze(-1) if x.dim() == 1 else x.movedim(in_dims[0], 0)
    return _through(last, *settings).reshape(last.shape[: x.dim()]), 0
