"""Tensors whose elements are not at their address, each with a word of what it is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

__all__ = ["ODD", "Doubled", "Named"]


class Named(Tensor):
    """A subclass that changes nothing."""


class Logging(Tensor):
    """A subclass with memory that takes part in every operation."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class Doubled(Tensor):
    """A wrapper, as quantized weights and DTensors are: its own memory is nowhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        made: Doubled = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [item.inner if isinstance(item, Doubled) else item for item in args]
        result = func(*inner, **(kwargs or {}))
        return Doubled(result) if isinstance(result, Tensor) else result


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def _masked() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(4), torch.ones(4) > 0)


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


def _resized(nbytes: int) -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(4).to_sparse_csr()


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "wrapper": (lambda: Doubled(torch.ones(4)), "__torch_dispatch__"),
    "dispatching": (lambda: torch.ones(4).as_subclass(Logging), "__torch_dispatch__"),
    "fake": (_fake, "__torch_dispatch__"),
    "masked": (_masked, "__torch_dispatch__"),
    "jagged": (lambda: _nested(torch.jagged), "__torch_dispatch__"),
    "nested": (lambda: _nested(torch.strided), "nested"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "without memory"),
    "zeros by name": (lambda: torch._efficientzerotensor(4), "without memory"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "layout"),
    "sparse rows": (_csr, "layout"),
    "mkldnn": (lambda: torch.ones(4, 4).to_mkldnn(), "layout"),
    "freed": (lambda: _resized(0), "has 0 bytes"),
    "cut": (lambda: _resized(8), "has 8 bytes"),
}
