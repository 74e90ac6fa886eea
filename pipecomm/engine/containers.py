"""Opens what tensors come in: any container that torch's pytree knows; mappings made of a dict."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

__all__ = ["Opened", "find_hidden", "has_rows", "map_leaves", "open_container"]

# Objects that find_hidden looks at before it takes the rest for harmless.
_MAX_OBJECTS = 1000


@dataclass(frozen=True)
class Opened:
    """A container's items, each with its path ("[0]", "['mask']", ".mask"), and the way back."""

    items: list[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]


def open_container(value: Any) -> Opened | None:
    """One level of `value`; None for what cannot be opened, or holds nothing by sample.

    A class of mappings that pytree does not know can be opened if it gives the same items when
    made of a dict of them.
    """
    if isinstance(value, PackedSequence):  # its dim 0 is not that of the samples
        return None
    kind: Any = namedtuple if pytree.is_namedtuple_instance(value) else type(value)
    if node := pytree.SUPPORTED_NODES.get(kind):
        return _open_node(node, value)
    return _open_mapping(value) if isinstance(value, Mapping) else None


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with function(leaf) for each leaf; itself where that changes none."""
    opened = open_container(value)
    if opened is None:
        return function(value)
    old = [item for _, item in opened.items]
    new = [map_leaves(function, item) for item in old]
    is_same = all(before is after for before, after in zip(old, new, strict=True))
    return value if is_same else opened.rebuild(new)


def has_rows(value: Any) -> bool:
    """Whether it is a tensor, or an array of another library, with any dimension."""
    return hasattr(type(value), "__dlpack__") and len(getattr(value, "shape", ())) > 0


def find_hidden(value: Any) -> tuple[str, Any] | None:
    """The first tensor or array with rows that `value`, an object that cannot be opened, holds or
    is, by its path in it; None without one.

    Looks into attributes, slots and the usual containers, at most 1000 objects.
    """
    queue = deque([("", value)])
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MAX_OBJECTS:
        path, item = queue.popleft()
        if has_rows(item):
            return path, item
        if id(item) not in seen:
            seen[id(item)] = item
            queue.extend((path + step, inner) for step, inner in _inside(item))
    return None


def _open_node(node: pytree.NodeDef, value: Any) -> Opened:
    # Not by pytree's tree_flatten: its helper is a cycle that holds the tensors until it is
    # collected.
    items, context = node.flatten_fn(value)
    paths = [f"[{index}]" for index in range(len(items))]
    if node.flatten_with_keys_fn is not None:
        named, _ = node.flatten_with_keys_fn(value)
        paths = [pytree.keystr((key,)) for key, _ in named]
    return Opened(list(zip(paths, items, strict=True)), lambda new: node.unflatten_fn(new, context))


def _open_mapping(value: Mapping[Any, Any]) -> Opened | None:
    made_of: Any = type(value)
    items = dict(value)
    try:
        again = dict(made_of(items))
    except Exception:  # whatever a constructor makes of it
        return None
    if again.keys() != items.keys() or any(again[key] is not items[key] for key in items):
        return None
    return Opened(
        [(f"[{key!r}]", item) for key, item in items.items()],
        lambda new: made_of(dict(zip(items, new, strict=True))),
    )


def _inside(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, (Tensor, ModuleType, type)):
        return
    if isinstance(item, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in item.items())
    elif isinstance(item, (tuple, list, set, frozenset, deque)):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(item))
    attributes = dict(getattr(item, "__dict__", {}))
    for slots in (vars(kind).get("__slots__", ()) for kind in type(item).__mro__):
        names = (slots,) if isinstance(slots, str) else slots
        attributes.update((name, getattr(item, name, None)) for name in names)
    yield from ((f".{name}", inner) for name, inner in attributes.items())
