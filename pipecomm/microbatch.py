"""Cuts what a step was given into microbatches; knows rows (dim 0), not stages or links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomm.errors import ConfigError

__all__ = ["Microbatches", "num_rows", "split", "split_step"]


@dataclass(frozen=True)
class Microbatches:
    """One step's data, a list entry per microbatch.

    `rows[i]` is the number of rows of microbatch i, or None where this rank was given no tensor.
    """

    inputs: list[tuple[Any, ...]]
    targets: list[Any]
    kwargs: list[dict[str, Any]]
    rows: list[int | None]

    def weights(self) -> list[float]:
        """Each microbatch's share of the rows; equal shares where the rows are not known."""
        known = [rows for rows in self.rows if rows is not None]
        if len(known) < len(self.rows):
            return [1 / len(self.rows)] * len(self.rows)
        return [rows / sum(known) for rows in known]


def split_step(
    inputs: Any, targets: Any, kwargs: Any, num_microbatches: int, *, takes_inputs: bool = True
) -> Microbatches:
    """The step's data in `num_microbatches` microbatches.

    A list or an iterator holds ready microbatches, of which exactly `num_microbatches` are taken;
    anything else is one batch, split by split(). With takes_inputs false, `inputs` serve only to
    check the number of rows. Raises ConfigError for too few rows or microbatches, and for tensors
    whose rows do not agree.
    """
    if not takes_inputs and _is_ready(inputs):
        inputs = None
    if takes_inputs and inputs is None and not kwargs:
        raise ConfigError(
            "the first stage needs inputs; got inputs=None and no kwargs; "
            "pass a tensor, a tuple of tensors, or a list or iterator of microbatches"
        )
    given = {"inputs": inputs, "targets": targets, "kwargs": kwargs}
    whole = {name: value for name, value in given.items() if not _is_ready(value)}
    _check_rows(whole, num_microbatches, "in the batch")
    parts = {name: _cut(name, value, num_microbatches) for name, value in given.items()}
    rows = [
        _check_rows({name: part[i] for name, part in parts.items()}, 1, f"in microbatch {i}")
        for i in range(num_microbatches)
    ]
    return Microbatches(
        inputs=[_as_args(part) for part in parts["inputs"]],
        targets=parts["targets"],
        kwargs=[part or {} for part in parts["kwargs"]],
        rows=rows,
    )


def split(value: Any, num_parts: int) -> list[Any]:
    """`value` in `num_parts` parts.

    Tensors, also those inside a tuple, list or dict, are split along dim 0 like
    torch.tensor_split (8 rows in 3 parts: 3, 3, 2; the parts are views). Everything else, scalar
    tensors included, is the same object in every part.
    """
    if isinstance(value, Tensor) and value.dim() > 0:
        return list(torch.tensor_split(value, num_parts))
    if type(value) in (tuple, list):
        columns = [split(item, num_parts) for item in value]
        return [type(value)(column[i] for column in columns) for i in range(num_parts)]
    if type(value) is dict:
        named = {key: split(item, num_parts) for key, item in value.items()}
        return [{key: column[i] for key, column in named.items()} for i in range(num_parts)]
    return [value] * num_parts


def num_rows(value: Any) -> int | None:
    """Rows of the first tensor in `value` that has any dimension; None without one."""
    return next((tensor.shape[0] for _, tensor in _tensors("", value)), None)


def _is_ready(value: Any) -> bool:
    return isinstance(value, list) or hasattr(value, "__next__")


def _cut(name: str, value: Any, num_microbatches: int) -> list[Any]:
    if not _is_ready(value):
        return split(value, num_microbatches)
    # zip stops before it takes an item too many from an iterator that lives on.
    taken = [item for _, item in zip(range(num_microbatches), value, strict=False)]
    num_given = len(value) if isinstance(value, list) else len(taken)
    if num_given != num_microbatches:
        raise ConfigError(
            f"expected {num_microbatches} microbatches in {name}; got {num_given}; nothing of this "
            f"step has run. Give one item per microbatch, or stop before the last, partial step"
        )
    return taken


def _as_args(part: Any) -> tuple[Any, ...]:
    if part is None:
        return ()
    return tuple(part) if isinstance(part, (tuple, list)) else (part,)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield name, value
    elif type(value) in (tuple, list):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)


def _check_rows(values: dict[str, Any], min_rows: int, where: str) -> int | None:
    """The number of rows that all tensors in `values` have; None without a tensor."""
    named = [pair for name, value in values.items() for pair in _tensors(name, value)]
    if not named:
        return None
    first_name, first = named[0]
    for name, tensor in named[1:]:
        if tensor.shape[0] != first.shape[0]:
            raise ConfigError(
                f"expected as many rows (dim 0) in every tensor {where}; got "
                f"{_shape(first_name, first)} and {_shape(name, tensor)}. A tensor that has "
                f"no row per sample belongs in a buffer of the module or an object of your own"
            )
    if first.shape[0] < min_rows:
        raise ConfigError(
            f"expected at least 1 row for each microbatch; got {first.shape[0]} rows for "
            f"{min_rows} microbatches {where} ({_shape(first_name, first)}). Use fewer "
            f"microbatches, or drop or pad the last batch"
        )
    return first.shape[0]


def _shape(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)}"
