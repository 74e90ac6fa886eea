"""Whether a tensor's elements lie at its address: what must hold before a pointer is taken."""

from __future__ import annotations

from torch import Tensor, strided

__all__ = ["ADVICE", "why_not_addressable"]

ADVICE = (
    "give a plain tensor made from it, such as to_local() or full_tensor() of a DTensor, "
    "dequantize(), to_dense(), to_padded_tensor()"
)


def why_not_addressable(tensor: Tensor) -> str | None:
    """What `tensor` is, if its elements do not lie at its data_ptr(); else None.

    Subclasses may change what operations do to their memory, not what their memory means:
    Parameter passes, and with it every class that leaves __torch_dispatch__ alone.
    """
    kind = type(tensor)
    # It alone knows what its values are; its data_ptr() is often 0.
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, a class with a __torch_dispatch__ of its own"
    if tensor.layout != strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a tensor of dtype {tensor.dtype}"
    needed = _end_nbytes(tensor)
    without_memory = f"a {kind.__name__} without memory of its own"
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except RuntimeError:  # torch's, for tensors that only stand for others
        return without_memory
    if storage.nbytes() < needed:
        return (
            f"a tensor whose storage has {storage.nbytes()} bytes, where shape "
            f"{tuple(tensor.shape)} needs {needed}"
        )
    return without_memory if needed > 0 and address == 0 else None


def _end_nbytes(tensor: Tensor) -> int:
    """Bytes of its storage up to the end of the last element; 0 without elements."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((n - 1) * stride for n, stride in strides)
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()
