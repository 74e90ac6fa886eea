"""What is opened to find tensors, what is left alone, and how far a search goes."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from pipecomm.engine.containers import find_hidden, has_rows, map_leaves, open_container


class Point(NamedTuple):
    x: int
    y: int


class Counted(UserDict[str, Any]):
    """A mapping whose constructor wants more than a dict."""

    def __init__(self, data: dict[str, Any], number: int) -> None:
        super().__init__(data)
        self.number = number


class Halved(dict[str, Any]):
    """A mapping that gives other items than it was made of."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__({key: value / 2 for key, value in data.items()})


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ((1, 2), ["[0]", "[1]"]),
        ({"a": 1, 2: 3}, ["['a']", "[2]"]),
        (UserDict(a=1), ["['a']"]),
        (Point(1, 2), [".x", ".y"]),
        (torch.return_types.max((1, 2)), ["[0]", "[1]"]),
        ((), []),
    ],
)
def test_items_are_named_as_they_are_reached(value: Any, paths: list[str]) -> None:
    opened = open_container(value)
    assert opened is not None
    assert [path for path, _ in opened.items] == paths
    assert opened.rebuild([item for _, item in opened.items]) == value


@pytest.mark.parametrize(
    "value", [1, "text", None, torch.ones(2), Counted({"a": 1}, 2), Halved({"a": 1.0}), object()]
)
def test_what_cannot_be_rebuilt_is_not_opened(value: Any) -> None:
    assert open_container(value) is None


def test_mapped_container_is_the_same_object_where_nothing_changes() -> None:
    value = {"a": (1, [2]), "b": OrderedDict(c=UserDict(d=3))}
    assert map_leaves(lambda leaf: leaf, value) is value
    mapped = map_leaves(lambda leaf: -3 if leaf == 3 else leaf, value)
    assert mapped["a"] is value["a"]
    assert mapped["b"] == OrderedDict(c=UserDict(d=-3))


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_opened_and_searched_objects_are_free_when_they_are_dropped() -> None:
    rows, hidden = torch.ones(2), Holder([{"y": torch.ones(2)}])
    watched = [weakref.ref(rows), weakref.ref(hidden)]
    gc.disable()
    try:
        map_leaves(lambda leaf: leaf + 1, {"a": (rows, [UserDict(b=rows)])})
        find_hidden(hidden)
        del rows, hidden
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()


def test_search_ends_after_a_thousand_objects() -> None:
    near = SimpleNamespace(items=[object() for _ in range(900)], x=torch.ones(2))
    far = SimpleNamespace(items=[[object()] for _ in range(1100)], deep=[[[torch.ones(2)]]])
    found = find_hidden(near)
    assert found is not None
    assert found[0] == ".x"
    assert find_hidden(far) is None


def test_constants_of_pytree_hold_nothing() -> None:
    class Constant:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Constant)

        def __hash__(self) -> int:
            return 0

    pytree.register_constant(Constant)
    value = Constant()
    assert map_leaves(lambda leaf: None, value) is value


def test_scalars_have_no_rows() -> None:
    assert has_rows(torch.ones(1))
    assert not has_rows(torch.ones(()))
    assert not has_rows(1.0)
