"""A tensor as a part of a message: what the core is told of it, and the tensor that arrives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipecomm._native import core
from pipecomm.addressable import ADVICE, why_not_addressable
from pipecomm.codecs.codec import Codec
from pipecomm.errors import TensorError

__all__ = ["CPU_INDEX", "to_part", "to_tensor"]

# The core's number for the CPU.
CPU_INDEX = -1
_RAW = "raw"


def to_part(
    tensor: Tensor | None, codec: Codec, min_nbytes: int
) -> tuple[core.SendPart, Tensor | None]:
    """The part, and the tensor whose memory it names: `tensor` itself, but for a copy it needs.

    A raw tensor is read in the order of its memory. Others are read row by row, so that a
    codec's groups lie inside a row whatever the strides.

    Raises TensorError for a tensor whose elements are not at its address.
    """
    if tensor is None:
        return (None, "uint8", (), (), _RAW, False, CPU_INDEX), None
    refused = why_not_addressable(tensor)
    if refused is not None:
        raise TensorError(f"expected a dense tensor to send; got {refused}; {ADVICE}")
    data = tensor.detach().resolve_conj().resolve_neg()
    order = _dense_order(data)
    is_coded = codec.covers(data, min_nbytes)
    if is_coded or order is None:
        data = data.contiguous()
    places = order or ()
    if places == tuple(range(data.dim())):
        places = ()
    name = codec.name if is_coded else _RAW
    dtype = str(data.dtype).removeprefix("torch.")
    index = data.device.index if data.is_cuda else CPU_INDEX
    shape = tuple(data.shape)
    return (data.data_ptr(), dtype, shape, places, name, tensor.requires_grad, index), data


def to_tensor(part: core.ReceivedPart, target: torch.device) -> Tensor | None:
    """The tensor that arrived, on `target`, with the sender's dense strides; None if absent.

    `part` is one of those that the core's take() gives.
    """
    data, dtype_name, shape, order, is_raw, requires_grad, absent = part
    if absent:
        return None
    dtype = getattr(torch, dtype_name)
    if data is None:
        flat = torch.empty(0, dtype=dtype, device=target)
    else:
        # The host need not wait for a copy: also pinned memory goes back in the stream's order.
        flat = from_dlpack(data).view(dtype)
        flat = flat.to(target, non_blocking=target.type == "cuda")
    if not order:
        tensor = flat.view(shape)
    elif is_raw:
        tensor = _by_order(flat, shape, order)
    else:
        tensor = _by_order(torch.empty_like(flat), shape, order).copy_(flat.view(shape))
    return tensor.requires_grad_(requires_grad)


def _dense_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions by their place in memory, outermost first; None where elements overlap or leave
    gaps.

    A dimension of size 1 counts by its stride, too: torch recognises channels-last by it.
    """
    shape, strides = tensor.shape, tensor.stride()
    if min(shape, default=2) > 1 and tensor.is_contiguous():
        return tuple(range(len(shape)))
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], shape[dim] <= 1))
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1:
            if strides[dim] != expected:
                return None
            expected *= shape[dim]
    return tuple(order)


def _by_order(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """A view of `flat`'s elements as a tensor of that shape, whose memory has that order."""
    places = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(places)
