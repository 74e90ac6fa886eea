"""Codecs: how a tensor's values are coded on the wire, and tensors to wire bytes and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipecomm._native import core
from pipecomm.errors import ConfigError, NotBuiltError, TensorError

__all__ = ["Codec"]

_QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Codec:
    """A named way to code a tensor's values on the wire.

    ``raw`` copies the bytes of any dtype. ``int8`` (symmetric; groups of 64, or
    ``int8:group=32`` or ``128``) and ``int4`` (asymmetric, groups of 32) quantize float32,
    bfloat16 and float16; groups lie along the last dimension. A group that holds NaN or
    infinity decodes to NaN as a whole. docs/wire_format.md has the bytes and error bounds.

    ``name`` is the canonical text: ``Codec("int8:group=64") == Codec("int8")``. Any other text
    raises ConfigError, which lists what is known.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"expected a codec's name, such as 'int8'; got {self.name!r}")
        object.__setattr__(self, "name", core.codec_name(self.name))

    @classmethod
    def parse(cls, spec: str | Codec) -> Codec:
        """The codec a user named, by text or by object."""
        return spec if isinstance(spec, Codec) else cls(spec)

    @property
    def is_raw(self) -> bool:
        return self.name == "raw"

    def __str__(self) -> str:
        return self.name

    def wire_nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that a tensor of this shape and dtype takes on the wire.

        Raises TensorError for a dtype this codec cannot code, or a shape that cannot be.
        """
        self._check_dtype(dtype)
        if any(extent < 0 for extent in shape):
            raise TensorError(f"expected a shape with extents >= 0; got {tuple(shape)}")
        if self.is_raw:
            return math.prod(shape) * dtype.itemsize
        return int(core.codec_wire_nbytes(self.name, *_grid(shape)))

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The wire bytes of ``x``, as a 1-D uint8 tensor on the same device.

        ``x`` may have any shape and layout. ``out``, if given, is a contiguous 1-D uint8 tensor
        of exactly ``wire_nbytes(x.shape, x.dtype)`` bytes; it is filled and returned. Gradients
        do not flow through. On CUDA the work goes to torch's current stream.

        Raises TensorError for a dtype, layout, device or size that does not fit; NotBuiltError
        for a CUDA tensor where pipecomm was built without CUDA.
        """
        nbytes = self.wire_nbytes(x.shape, x.dtype)
        _check_device(x)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        else:
            _check_wire(out, nbytes, x, "out")
        source = x.detach().resolve_conj().resolve_neg().contiguous()
        if self.is_raw:
            return out.copy_(_bytes_of(source))
        self._run("codec_encode", source, source.data_ptr(), out.data_ptr())
        return out

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` with the tensor whose wire bytes are ``wire``; return ``out``.

        ``wire`` is what ``encode`` gave for a tensor of ``out``'s shape; ``out`` may have any
        layout. Bytes that ``encode`` never makes decode to some values, safely.

        Raises TensorError, before anything is written, as ``encode`` does.
        """
        nbytes = self.wire_nbytes(out.shape, out.dtype)
        _check_device(out)
        _check_wire(wire, nbytes, out, "wire")
        plain = out.detach()
        if plain.is_conj() or plain.is_neg():
            raise TensorError("expected out without a pending conjugate or negation; got a view")
        target = plain
        if not plain.is_contiguous():
            target = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        if self.is_raw:
            _bytes_of(target).copy_(wire)
        else:
            self._run("codec_decode", target, wire.data_ptr(), target.data_ptr())
        if target is not plain:
            plain.copy_(target)
        if not out.is_inference():
            # Autograd must notice that a tensor it has saved has changed.
            torch.autograd.graph.increment_version(out)
        return out

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if self.is_raw or dtype in _QUANTIZABLE:
            return
        raise TensorError(
            f"codec {self.name!r}: expected float32, bfloat16 or float16; got {dtype}. "
            "Send other dtypes with codec 'raw'."
        )

    def _run(self, function: str, tensor: torch.Tensor, source: int, target: int) -> None:
        rows, cols = _grid(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not tensor.is_cuda:
            getattr(core, function)(self.name, dtype, source, rows, cols, target)
            return
        if not core.build_info()["cuda"]:
            raise NotBuiltError(
                f"codec {self.name!r} on {tensor.device} needs pipecomm's CUDA kernels; this "
                "build has none. Build again where nvcc is on PATH (PIPECOMM_CUDA=on)."
            )
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream().cuda_stream
            getattr(core, f"{function}_cuda")(self.name, dtype, source, rows, cols, target, stream)


def _grid(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: columns are the last dimension, which the groups divide."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 0 else (1, 1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TensorError(f"expected a dense tensor; got layout {tensor.layout}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TensorError(f"expected a tensor on the CPU or a CUDA device; got {tensor.device}")


def _check_wire(wire: torch.Tensor, nbytes: int, tensor: torch.Tensor, name: str) -> None:
    got = f"{wire.dtype} of shape {tuple(wire.shape)} on {wire.device}"
    what = f"shape {tuple(tensor.shape)}, {tensor.dtype}"
    if wire.dtype != torch.uint8 or wire.dim() != 1 or not wire.is_contiguous():
        raise TensorError(f"{name}: expected a contiguous 1-D uint8 tensor; got {got}")
    if wire.device != tensor.device:
        raise TensorError(f"{name}: expected a tensor on {tensor.device}; got {got}")
    if wire.numel() != nbytes:
        raise TensorError(f"{name}: expected {nbytes} bytes for {what}; got {wire.numel()}")
    (low, end), (other_low, other_end) = _extent(wire), _extent(tensor)
    if low < other_end and other_low < end:
        raise TensorError(f"{name}: expected memory of its own; got a part of the tensor's")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last that the tensor's elements take; equal for none."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
