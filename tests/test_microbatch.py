"""How a step's data is cut into microbatches, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecomm.errors import ConfigError
from pipecomm.microbatch import num_rows, split, split_step


@dataclass
class Opaque:
    value: Tensor


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
    "value", [None, 7, True, "text", Opaque(torch.zeros(4)), torch.tensor(1.0), object()]
)
def test_split_gives_the_same_object_to_every_part(value: Any) -> None:
    assert all(part is value for part in split(value, 3))


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
