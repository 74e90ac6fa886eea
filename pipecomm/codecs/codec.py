"""Codecs: how a tensor's values are coded on the wire, and tensors to wire bytes and back."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipecomm._native import core
from pipecomm.addressable import ADVICE, why_not_addressable
from pipecomm.errors import ConfigError, NotBuiltError, TensorError
from pipecomm.settings import MIN_NBYTES

__all__ = ["QUANTIZABLE", "Codec"]

# The dtypes that codecs other than "raw" take.
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Codec:
    """A named way to code a tensor's values on the wire.

    ``raw`` copies the bytes of any dtype. The others quantize float32, bfloat16 and float16 in
    groups along the last dimension, each group with a bfloat16 scale:

    * ``int8``: symmetric, groups of 64 (``int8:group=32`` or ``128``);
    * ``int4``: asymmetric, groups of 32; ``int4-symmetric``: groups of 64;
    * ``fp8``: e4m3, groups of 64 (or ``group=32``, ``128``); ``nf4``: groups of 64.

    Options follow a colon, separated by commas: ``int4:hadamard=64,rounding=stochastic,seed=7``.
    ``hadamard=64`` (groups up to 64) spreads outliers over 64 neighbours by a Walsh-Hadamard
    transform with random signs. ``rounding=stochastic`` (integer codecs) is unbiased; its noise
    depends on ``seed``, on the message and on the element. ``spikes=1``, ``2`` or ``4`` (not with
    ``hadamard``) keeps that many values of each group, the largest, out of its scale and sends
    them as bfloat16.

    A group that holds NaN or infinity decodes to NaN as a whole; with ``hadamard``, the block
    of 64; with ``spikes``, only if it holds more of them than spikes.
    docs/wire_format.md has the bytes and error bounds.

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

    def covers(self, tensor: torch.Tensor, min_nbytes: int = MIN_NBYTES.default) -> bool:
        """Whether the tensor goes through this codec on its way; others travel bit for bit."""
        return not self.is_raw and tensor.dtype in QUANTIZABLE and tensor.nbytes >= min_nbytes

    def wire_nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that a tensor of this shape and dtype takes on the wire.

        Raises TensorError for a dtype this codec cannot code, or a shape that cannot be.
        """
        self._check_dtype(dtype)
        extents = _checked_shape(shape)
        if self.is_raw:
            return math.prod(extents) * dtype.itemsize
        return core.codec_wire_nbytes(self.name, *_grid(extents))

    def encode(
        self, x: torch.Tensor, out: torch.Tensor | None = None, seed: int | None = None
    ) -> torch.Tensor:
        """The wire bytes of ``x``, as a 1-D uint8 tensor on the same device.

        ``x`` may have any shape and layout. ``seed`` (0 to 2^64 - 1) takes the place of the
        codec's own for stochastic rounding: the same seed gives the same bytes; other codecs do
        not look at it. ``out``, if given, is a contiguous 1-D uint8 tensor
        of exactly ``wire_nbytes(x.shape, x.dtype)`` bytes; it is filled and returned. Gradients
        do not flow through. On CUDA the work goes to torch's current stream.

        Raises TensorError for a class, dtype, layout, device or size that does not fit; ConfigError
        for a seed that is not such a number; NotBuiltError for a CUDA tensor where pipecomm was
        built without CUDA.
        """
        _check_tensor(x, "x")
        _check_seed(seed)
        nbytes = self.wire_nbytes(x.shape, x.dtype)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        else:
            _check_wire(out, nbytes, x, "out")
        source = x.detach().resolve_conj().resolve_neg().contiguous()
        if self.is_raw:
            return out.copy_(_bytes_of(source))
        dtype, rows, cols = _dtype_and_grid(source)
        src, dst = source.data_ptr(), out.data_ptr()
        if source.is_cuda:
            with self._stream_of(source.device) as stream:
                core.codec_encode_cuda(self.name, dtype, src, rows, cols, dst, stream, seed)
        else:
            core.codec_encode(self.name, dtype, src, rows, cols, dst, seed)
        return out

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` with the tensor whose wire bytes are ``wire``; return ``out``.

        ``wire`` is what ``encode`` gave for a tensor of ``out``'s shape; ``out`` may have any
        layout. Bytes that ``encode`` never makes decode to some values, safely.

        Raises TensorError, before anything is written, as ``encode`` does.
        """
        _check_tensor(out, "out")
        nbytes = self.wire_nbytes(out.shape, out.dtype)
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
            self._decode(wire, target)
        if target is not plain:
            plain.copy_(target)
        if not out.is_inference():
            # Autograd must notice that a tensor it has saved has changed.
            torch.autograd.graph.increment_version(out)
        return out

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype):
            raise TensorError(f"expected a torch.dtype, such as torch.bfloat16; got {dtype!r}")
        if self.is_raw or dtype in QUANTIZABLE:
            return
        raise TensorError(
            f"codec {self.name!r}: expected float32, bfloat16 or float16; got {dtype}. "
            "Send other dtypes with codec 'raw'."
        )

    def _decode(self, wire: torch.Tensor, target: torch.Tensor) -> None:
        dtype, rows, cols = _dtype_and_grid(target)
        src, dst = wire.data_ptr(), target.data_ptr()
        if target.is_cuda:
            with self._stream_of(target.device) as stream:
                core.codec_decode_cuda(self.name, dtype, src, rows, cols, dst, stream)
        else:
            core.codec_decode(self.name, dtype, src, rows, cols, dst)

    @contextlib.contextmanager
    def _stream_of(self, device: torch.device) -> Iterator[int]:
        """The address of a CUDA device's current stream; the device is current inside."""
        if not core.build_info()["cuda"]:
            raise NotBuiltError(
                f"codec {self.name!r} on {device} needs pipecomm's CUDA kernels; this "
                "build has none. Build again where nvcc is on PATH (PIPECOMM_CUDA=on)."
            )
        with torch.cuda.device(device):
            yield torch.cuda.current_stream().cuda_stream


def _dtype_and_grid(tensor: torch.Tensor) -> tuple[str, int, int]:
    return str(tensor.dtype).removeprefix("torch."), *_grid(tensor.shape)


def _grid(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: columns are the last dimension, which the groups divide."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 0 else (1, 1)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        raise TensorError(f"expected a shape, a sequence of whole numbers; got {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise TensorError(f"expected a shape with extents >= 0; got {extents}")
    # What C++ counts in 64 bits, with room for bytes.
    if math.prod(max(extent, 1) for extent in extents) >= 2**60:
        raise TensorError(f"expected a shape with fewer than 2^60 elements; got {extents}")
    return extents


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TensorError(f"{name}: expected a torch tensor; got {type(value).__name__}")
    device = value.device
    if device.type not in ("cpu", "cuda"):
        raise TensorError(f"{name}: expected a tensor on the CPU or a CUDA device; got {device}")
    refused = why_not_addressable(value)
    if refused is not None:
        raise TensorError(f"{name}: expected a dense tensor; got {refused}; {ADVICE}")


def _check_seed(seed: object) -> None:
    is_number = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**64
    if seed is not None and not is_number:
        raise ConfigError(f"expected a seed from 0 to 2^64 - 1, or None; got {seed!r}")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # view() would refuse the strides of a slice of one element, or none.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _check_wire(wire: torch.Tensor, nbytes: int, tensor: torch.Tensor, name: str) -> None:
    _check_tensor(wire, name)
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
