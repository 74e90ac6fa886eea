"""How a step's data is cut into microbatches, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import pipecomm
from pipecomm.engine.microbatch import num_rows, split, split_step
from pipecomm.errors import ConfigError


@dataclass
class Opaque:
    value: Tensor


class Pair(NamedTuple):
    value: Any
    label: Any


@dataclass
class Registered:
    value: Any


pytree.register_dataclass(Registered)


class Unnamed(Opaque):
    pass


pytree.register_pytree_node(
    Unnamed, lambda node: ([node.value], None), lambda items, _: Unnamed(*items)
)


class BatchEncoding(UserDict[str, Any]):
    """What tokenizers of Hugging Face return: made of a dict, and of more."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def __getitem__(self, item: Any) -> Any:
        return self.data[item] if isinstance(item, str) else self.encodings[item]


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Stubborn(Mapping[str, Any]):
    """A mapping that cannot be made of a dict of its items."""

    def __init__(self, value: Any) -> None:
        self.items_ = {"value": value}

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def sizes(parts: list[Tensor]) -> list[int]:
    return [len(part) for part in parts]


@given(num=st.integers(1, 40), parts=st.integers(1, 12))
def test_split_cuts_like_tensor_split_and_loses_no_row(num: int, parts: int) -> None:
    rows = torch.arange(num * 2).reshape(num, 2)
    cut = split(rows, parts)
    assert sizes(cut) == sizes(list(torch.tensor_split(rows, parts)))
    assert torch.equal(torch.cat(cut), rows)


def test_split_of_8_rows_in_3_parts_gives_3_3_2() -> None:
    assert sizes(split(torch.zeros(8, 16), 3)) == [3, 3, 2]


def test_split_parts_are_views_of_the_batch() -> None:
    rows = torch.zeros(4, 2)
    split(rows, 2)[1].fill_(1)
    assert rows[2:].eq(1).all()


def test_split_reaches_into_tuples_lists_and_dicts() -> None:
    rows = torch.arange(4)
    first, second = split((rows, {"a": [rows + 10]}), 2)
    assert torch.equal(first[0], torch.tensor([0, 1]))
    assert torch.equal(second[1]["a"][0], torch.tensor([12, 13]))
    assert isinstance(second, tuple)
    assert isinstance(second[1]["a"], list)


@pytest.mark.parametrize(
    "value", [None, 7, True, "text", Opaque(torch.tensor(4.0)), torch.tensor(1.0), object()]
)
def test_split_gives_the_same_object_to_every_part(value: Any) -> None:
    assert all(part is value for part in split(value, 3))


CONTAINERS: dict[str, Any] = {
    "OrderedDict": OrderedDict(a=torch.arange(4)),
    "defaultdict": defaultdict(list, a=torch.arange(4)),
    "deque": deque([torch.arange(4)]),
    "namedtuple": Pair(torch.arange(4), "text"),
    "result of torch": torch.arange(8).reshape(4, 2).max(dim=1),
    "registered dataclass": Registered(torch.arange(4)),
    "registered without names": Unnamed(torch.arange(4)),
    "UserDict": UserDict(a=torch.arange(4)),
    "batch of a tokenizer": BatchEncoding({"a": torch.arange(4)}, encodings=["whole"]),
    "subclass of dict": Attributes(a=torch.arange(4)),
    "frozen mapping": MappingProxyType({"a": torch.arange(4)}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_is_split_into_containers_of_its_class(name: str) -> None:
    whole = CONTAINERS[name]
    for value, inner in ((whole, lambda part: part), ({"x": (whole,)}, lambda part: part["x"][0])):
        parts = [inner(part) for part in split(value, 2)]
        assert [type(part) for part in parts] == [type(whole)] * 2
        assert [num_rows(part) for part in parts] == [2, 2]


def test_split_container_holds_its_rows_and_keeps_the_rest() -> None:
    assert [part.data["a"].tolist() for part in split(CONTAINERS["batch of a tokenizer"], 2)] == [
        [0, 1],
        [2, 3],
    ]
    assert [part.label for part in split(CONTAINERS["namedtuple"], 2)] == ["text", "text"]
    assert split(CONTAINERS["defaultdict"], 2)[1].default_factory is list


def test_tokens_for_a_module_may_be_given_as_keywords_in_any_mapping() -> None:
    data = split_step(torch.zeros(4), None, CONTAINERS["batch of a tokenizer"], 2)
    assert [part["a"].tolist() for part in data.kwargs] == [[0, 1], [2, 3]]


PACKED = pack_sequence([torch.zeros(3), torch.zeros(2), torch.zeros(1)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Opaque(torch.zeros(4, 2)), r"Opaque, which holds inputs\[1\]\.value \[4, 2\]"),
        (Slotted(torch.zeros(4)), r"Slotted, which holds inputs\[1\]\.value \[4\]"),
        (
            Opaque([{"m": Slotted(torch.zeros(4))}]),
            r"Opaque, which holds inputs\[1\]\.value\[0\]\['m'\]\.value \[4\]",
        ),
        (Stubborn(torch.zeros(4)), r"Stubborn, which holds inputs\[1\]\['value'\] \[4\]"),
        (UserList([torch.zeros(4)]), r"UserList, which holds inputs\[1\]\.data\[0\] \[4\]"),
        (PACKED, r"PackedSequence, which holds inputs\[1\]\[0\] \[6\]"),
        (DataLoader(TensorDataset(torch.zeros(4))), r"DataLoader, which holds inputs\[1\]\."),
        (np.zeros((4, 2)), r"inputs\[1\]: expected tensors, .*; got ndarray \[4, 2\]"),
        (Opaque(np.zeros(4)), r"Opaque, which holds inputs\[1\]\.value \[4\]"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_tensor_in_an_object_that_cannot_be_opened_is_refused_by_type_and_path(
    value: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{text}.*pipecomm\.ForEveryMicrobatch"):
        split_step((torch.zeros(4), value), None, None, 2)


def test_refused_targets_leave_an_iterator_of_inputs_alone() -> None:
    source = iter([torch.zeros(2)] * 2)
    with pytest.raises(ConfigError, match=r"targets: expected tensors.*Opaque"):
        split_step(source, Opaque(torch.zeros(4)), None, 2)
    assert len(list(source)) == 2


def test_object_that_holds_itself_is_searched_once() -> None:
    value = Opaque(torch.tensor(0))
    value.value = [value]
    assert split(value, 2) == [value, value]


@pytest.mark.parametrize("value", [torch.zeros(7, 7), Opaque(torch.zeros(4)), np.zeros(3), PACKED])
def test_marked_value_is_the_same_object_in_every_part(value: Any) -> None:
    marked = pipecomm.ForEveryMicrobatch(value)
    data = split_step((torch.zeros(4), marked), {"y": marked}, {"table": marked}, 2)
    assert data.rows == [2, 2]
    assert all(args[1] is value for args in data.inputs)
    assert all(target["y"] is value for target in data.targets)
    assert all(part["table"] is value for part in data.kwargs)


def test_marked_value_in_ready_microbatches_is_the_value() -> None:
    table = torch.zeros(7, 7)
    ready = [(torch.zeros(2), pipecomm.ForEveryMicrobatch(table)) for _ in range(2)]
    assert all(args[1] is table for args in split_step(ready, None, None, 2).inputs)


def test_num_rows_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert num_rows({"scale": torch.tensor(2.0), "x": torch.zeros(5, 1)}) == 5
    assert num_rows((None, "text", torch.tensor(1))) is None


def test_step_splits_inputs_targets_and_kwargs_alike() -> None:
    rows = torch.arange(8)
    data = split_step((rows, rows + 8), rows + 16, {"pos": rows + 24}, 3)
    assert data.rows == [3, 3, 2]
    assert [len(part) for part in data.inputs] == [2, 2, 2]
    assert data.inputs[2][1].tolist() == [14, 15]
    assert data.targets[2].tolist() == [22, 23]
    assert data.kwargs[2]["pos"].tolist() == [30, 31]


def test_weights_are_shares_of_rows() -> None:
    data = split_step(torch.zeros(8, 2), None, None, 3)
    assert data.weights() == [3 / 8, 3 / 8, 2 / 8]


def test_weights_are_equal_where_no_tensor_is_given() -> None:
    data = split_step(None, None, None, 4, takes_inputs=False)
    assert data.rows == [None] * 4
    assert data.weights() == [0.25] * 4


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_weights_sum_to_one(counts: list[int]) -> None:
    ready = [torch.zeros(count) for count in counts]
    assert sum(split_step(ready, None, None, len(counts)).weights()) == pytest.approx(1)


def test_iterator_gives_exactly_the_microbatches_of_one_step() -> None:
    source = iter([torch.full((2,), n) for n in range(5)])
    data = split_step(source, None, None, 3)
    assert [args[0][0].item() for args in data.inputs] == [0, 1, 2]
    assert next(source)[0].item() == 3


def test_ready_microbatch_may_be_a_tuple_of_arguments() -> None:
    data = split_step([(torch.zeros(2), "a"), (torch.zeros(3), "b")], None, None, 2)
    assert [args[1] for args in data.inputs] == ["a", "b"]
    assert data.rows == [2, 3]


@pytest.mark.parametrize("part", [OrderedDict(a=torch.zeros(2)), {"a": torch.zeros(2)}, PACKED])
def test_ready_microbatch_that_is_no_tuple_of_arguments_is_one_argument(part: Any) -> None:
    data = split_step([part, part], None, None, 2)
    assert [len(args) for args in data.inputs] == [1, 1]
    assert all(args[0] is part for args in data.inputs)


def test_ready_microbatch_may_be_an_object_that_cannot_be_opened() -> None:
    ready = [Opaque(torch.zeros(2)), Opaque(torch.zeros(3))]
    data = split_step(ready, [torch.zeros(2), torch.zeros(3)], None, 2)
    assert [args[0] for args in data.inputs] == ready
    assert data.rows == [2, 3]


def test_list_of_a_default_collation_is_told_apart_in_the_error() -> None:
    (batch,) = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=8)
    assert type(batch) is list
    with pytest.raises(ConfigError, match=r"4 microbatches in inputs; got 2;.*tuple\(\.\.\.\)"):
        split_step(batch, None, None, 4)
    assert split_step(tuple(batch), None, None, 4).rows == [2] * 4


def test_inputs_of_a_later_stage_are_left_alone() -> None:
    source = iter([torch.zeros(2)])
    data = split_step(source, torch.zeros(4), None, 2, takes_inputs=False)
    assert data.rows == [2, 2]
    assert len(list(source)) == 1


@pytest.mark.parametrize("kind", [iter, list])
@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_too_few_ready_microbatches_are_refused(kind: Any, name: str) -> None:
    given = {"inputs": torch.zeros(8), "targets": torch.zeros(8)}
    given[name] = kind([torch.zeros(1)] * 5)
    with pytest.raises(ConfigError, match=rf"expected 8 microbatches in {name}; got 5"):
        split_step(given["inputs"], given["targets"], None, 8)


def test_list_of_too_many_microbatches_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 2 microbatches in inputs; got 3"):
        split_step([torch.zeros(1)] * 3, None, None, 2)


def test_error_of_an_iterator_passes_through() -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        split_step(broken(), None, None, 2)


def test_fewer_rows_than_microbatches_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="3 rows for 4 microbatches"):
        split_step(torch.zeros(3, 16), None, None, 4)


def test_empty_ready_microbatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="microbatch 1"):
        split_step([torch.zeros(2, 1), torch.zeros(0, 1)], None, None, 2)


@pytest.mark.parametrize(
    ("targets", "kwargs", "name"),
    [
        (torch.zeros(9, 1), None, r"targets \[9, 1\]"),
        (None, {"pos": torch.zeros(9, 1)}, r"kwargs\['pos'\] \[9, 1\]"),
        ((torch.zeros(8), [torch.zeros(9, 1)]), None, r"targets\[1\]\[0\] \[9, 1\]"),
    ],
)
def test_rows_that_do_not_agree_are_refused_with_both_shapes(
    targets: Any, kwargs: Any, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"inputs \[8, 16\] and {name}"):
        split_step(torch.zeros(8, 16), targets, kwargs, 4)


def test_rows_of_a_later_stage_are_checked_against_inputs_given_there() -> None:
    with pytest.raises(ConfigError, match=r"inputs \[8\] and targets \[9\]"):
        split_step(torch.zeros(8), torch.zeros(9), None, 4, takes_inputs=False)


def test_ready_microbatches_must_agree_one_by_one() -> None:
    ready = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(ConfigError, match=r"in microbatch 1; got inputs \[3\] and targets \[2\]"):
        split_step(ready, [torch.zeros(2), torch.zeros(2)], None, 2)


def test_first_stage_without_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="inputs=None"):
        split_step(None, torch.zeros(4), None, 2)


def test_first_stage_may_take_keywords_only() -> None:
    data = split_step(None, None, {"x": torch.zeros(4)}, 2)
    assert data.inputs == [(), ()]
    assert data.rows == [2, 2]
