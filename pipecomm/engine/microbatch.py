"""Cuts what a step was given into microbatches; knows rows (dim 0), not stages or links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomm.engine.containers import find_hidden, map_leaves, open_container
from pipecomm.errors import ConfigError

__all__ = ["ForEveryMicrobatch", "Microbatches", "num_rows", "split", "split_step"]


@dataclass(frozen=True, eq=False)
class ForEveryMicrobatch:
    """Marks, in a batch that is split, what every microbatch gets whole: `value`, the same object.

    For tensors without a row per sample (a mask of [length, length], a table) and objects that
    hold tensors. The module and the loss get `value` itself.
    """

    value: Any


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
    anything else is one batch, split by split(). All tensors of a microbatch have one number of
    rows; ready microbatches may differ in it. With takes_inputs false, `inputs` serve only to
    check the number of rows. Raises ConfigError for too few rows or microbatches, and for tensors
    whose rows do not agree, or cannot be seen.
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
    # Iterators last: what is refused must not cost them a step's items.
    names = sorted(given, key=lambda name: _is_ready(given[name]))
    parts = {name: _cut(name, given[name], num_microbatches) for name in names}
    rows = [
        _check_rows({name: parts[name][i] for name in given}, 1, f"in microbatch {i}")
        for i in range(num_microbatches)
    ]
    parts = {name: map_leaves(_unmarked, part) for name, part in parts.items()}
    return Microbatches(
        inputs=[_as_args(part) for part in parts["inputs"]],
        targets=parts["targets"],
        kwargs=[{} if part is None else dict(part) for part in parts["kwargs"]],
        rows=rows,
    )


def split(value: Any, num_parts: int, name: str = "value") -> list[Any]:
    """`value`, called `name` in errors, in `num_parts` parts.

    Tensors, also those inside a container that can be opened, are split along dim 0 like
    torch.tensor_split (8 rows in 3 parts: 3, 3, 2; the parts are views); each part has
    containers of the same classes. Scalar tensors, ForEveryMicrobatch and objects without
    tensors are the same in every part. Raises ConfigError for any other object.
    """
    if isinstance(value, Tensor) and value.dim() > 0:
        return list(torch.tensor_split(value, num_parts))
    opened = open_container(value)
    if opened is None:
        if not isinstance(value, ForEveryMicrobatch):
            _check_nothing_hidden(name, value)
        return [value] * num_parts
    columns = [split(item, num_parts, name + path) for path, item in opened.items]
    return [opened.rebuild([column[i] for column in columns]) for i in range(num_parts)]


def num_rows(value: Any) -> int | None:
    """Rows of the first tensor in `value` that has any dimension; None without one."""
    return next((tensor.shape[0] for _, tensor in _tensors("", value)), None)


def _is_ready(value: Any) -> bool:
    return isinstance(value, list) or hasattr(value, "__next__")


def _cut(name: str, value: Any, num_microbatches: int) -> list[Any]:
    if not _is_ready(value):
        return split(value, num_microbatches, name)
    # zip stops before it takes an item too many from an iterator that lives on.
    taken = [item for _, item in zip(range(num_microbatches), value, strict=False)]
    num_given = len(value) if isinstance(value, list) else len(taken)
    if num_given != num_microbatches:
        raise ConfigError(
            f"expected {num_microbatches} microbatches in {name}; got {num_given}; nothing of this "
            f"step has run. Give one item per microbatch, or stop before the last, partial step; "
            f"a list that is one batch (a DataLoader's default collation makes such) as tuple(...)"
        )
    return taken


def _unmarked(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, ForEveryMicrobatch) else leaf


def _as_args(part: Any) -> tuple[Any, ...]:
    if part is None:
        return ()
    is_several = isinstance(part, (tuple, list)) and open_container(part) is not None
    return tuple(part) if is_several else (part,)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors with rows in `value`, and their names."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield name, value
    elif not isinstance(value, ForEveryMicrobatch) and (opened := open_container(value)):
        for path, item in opened.items:
            yield from _tensors(name + path, item)


def _check_nothing_hidden(name: str, value: Any) -> None:
    """Raises ConfigError for tensors that the split would miss, and every microbatch get whole."""
    found = find_hidden(value)
    if found is None:
        return
    path, tensor = found
    holds = f", which holds {_shape(name + path, tensor)}" if path else f" {list(tensor.shape)}"
    raise ConfigError(
        f"{name}: expected tensors, in containers that can be split by rows; got "
        f"{type(value).__name__}{holds}. Give its tensors in a tuple or dict, register the class "
        f"with torch.utils._pytree, give a list of ready microbatches, or wrap it in "
        f"pipecomm.ForEveryMicrobatch if every microbatch is to get all of it"
    )


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
                f"no row per sample belongs in pipecomm.ForEveryMicrobatch, or in a module's buffer"
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
