"""Codecs for arrays of other libraries: NumPy, CuPy, JAX, anything that speaks DLPack.

One path for all of them. Arrays on a GPU (CuPy) take it too; that has not yet run on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pipecomm.codecs.codec import Codec
from pipecomm.errors import TensorError

__all__ = ["decode_array", "encode_array"]

# What libraries raise where they cannot give or take an array.
_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, AttributeError)


def encode_array(codec: str | Codec, x: Any, seed: int | None = None) -> Any:
    """The wire bytes of `x`, a 1-D uint8 array of the same library on the same device.

    `x` may have any shape and layout, may be read-only, and is read where it lies, without a
    copy of a contiguous one. `seed`, streams and the bytes are those of `Codec.encode`; DLPack
    orders torch's current stream after the array's own, and the array's after torch's.

    Raises TensorError for an array whose dtype, layout or device does not fit, and for what is
    not an array; otherwise as `Codec.encode`.
    """
    return _like(x, Codec.parse(codec).encode(_to_tensor(x, "x"), seed=seed))


def decode_array(codec: str | Codec, wire: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The array of this shape and dtype whose wire bytes are `wire`, of wire's library and device.

    `dtype` is the library's own, torch's, or a name such as "bfloat16". The result is new,
    contiguous and writable where its library has such arrays.

    Raises TensorError as `encode_array` does, also for a dtype that the library does not have.
    """
    chosen = Codec.parse(codec)
    source = _to_tensor(wire, "wire")
    torch_dtype = _to_torch_dtype(dtype)
    chosen.wire_nbytes(shape, torch_dtype)  # checks both, before memory is taken
    out = torch.empty(tuple(shape), dtype=torch_dtype, device=source.device)
    return _like(wire, chosen.decode(source, out))


def _to_tensor(x: Any, name: str) -> torch.Tensor:
    """`x` as a tensor over the same memory."""
    if isinstance(x, torch.Tensor):
        return x
    if not hasattr(x, "__dlpack__"):
        raise TensorError(f"{name}: expected an array with __dlpack__; got {type(x).__name__}")
    # torch 2.13 ends the process when it is given one of these.
    if any(stride < 0 for stride in getattr(x, "strides", None) or ()):
        x = x.copy()
    try:
        return from_dlpack(x)
    except _REFUSALS as error:
        what = f"{type(x).__name__} of dtype {getattr(x, 'dtype', 'unknown')}"
        raise TensorError(
            f"{name}: expected an array that torch can take over DLPack; got {what}: {error}"
        ) from error


def _like(array: Any, tensor: torch.Tensor) -> Any:
    """`tensor` as an array of `array`'s library, over the same memory."""
    if isinstance(array, torch.Tensor):
        return tensor
    try:
        # What NumPy 1 takes over DLPack is read-only.
        is_numpy = isinstance(array, np.ndarray)
        return tensor.numpy() if is_numpy else _library(array).from_dlpack(tensor)
    except _REFUSALS as error:
        raise TensorError(
            f"expected a library that takes {tensor.dtype} on {tensor.device} over DLPack; "
            f"got {type(array).__name__}: {error}"
        ) from error


def _library(array: Any) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    # CuPy 13 has no such method.
    return sys.modules.get(type(array).__module__.partition(".")[0])


def _to_torch_dtype(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        # float is float64 to NumPy, float32 to torch; None would be float64.
        name = "None" if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TensorError(f"expected a dtype that torch has, such as 'float32'; got {dtype!r}")
    return found
