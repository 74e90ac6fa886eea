"""Rows that the named schedules share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Kind, Row
from pipecomm.schedule.builders.rows import (
    Turns,
    alternating,
    check_batches,
    of_each,
    with_updates,
)

counts = st.integers(1, 9)


def test_row_of_a_kind_has_each_microbatch_in_order() -> None:
    assert [str(action) for action in Row(of_each(Kind.I, 2, 3))] == ["2I0", "2I1", "2I2"]


@given(counts, st.integers(0, 12))
def test_alternating_keeps_both_orders_and_the_warmup_in_front(
    num_microbatches: int, num_warmup: int
) -> None:
    forwards, backwards = (of_each(kind, 0, num_microbatches) for kind in (Kind.F, Kind.B))
    row = Row(alternating(forwards, backwards, num_warmup))
    assert [action for action in row if action.kind is Kind.F] == list(Row(forwards))
    assert [action for action in row if action.kind is Kind.B] == list(Row(backwards))
    first = row.index(Row(backwards)[0])
    # The first backward follows the warmup and one more forward, if there is one.
    assert first == min(num_warmup + 1, num_microbatches)


@given(counts, st.integers(0, 12))
def test_alternating_never_has_more_open_than_the_warmup_and_one(
    num_microbatches: int, num_warmup: int
) -> None:
    forwards, backwards = (of_each(kind, 0, num_microbatches) for kind in (Kind.F, Kind.B))
    num_open = peak = 0
    for action in Row(alternating(forwards, backwards, num_warmup)):
        num_open += action.kind.change_in_live
        peak = max(peak, num_open)
    assert num_open == 0
    assert peak == min(num_warmup + 1, num_microbatches)


def texts(row: object) -> str:
    return " ".join(map(str, Row(row)))  # type: ignore[arg-type]


def test_updates_follow_the_end_of_a_backward_whole_or_split() -> None:
    row = alternating(of_each(Kind.F, 0, 4), of_each(Kind.B, 0, 4), 1)
    assert texts(with_updates(row, 2)) == "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3"
    turns = Turns()
    for kind in (Kind.F, Kind.I, Kind.W):
        turns.add(kind, 1)
    assert texts(with_updates(turns.row(1), 1)) == "1F0 1I0 1W0 1U0"


def test_turns_number_each_kind_of_each_stage_and_a_whole_backward_is_both_parts() -> None:
    turns = Turns()
    for kind, stage in (
        (Kind.F, 0),
        (Kind.F, 3),
        (Kind.F, 0),
        (Kind.B, 0),
        (Kind.I, 0),
        (Kind.W, 0),
    ):
        turns.add(kind, stage)
    assert texts(turns.row(2)) == "0F0 3F0 0F1 0B0 0I1 0W1"
    assert texts(turns.row(1)) == "0F0 3F0 0B0"
    assert (turns.count(Kind.W, 0), turns.count(Kind.F, 1)) == (2, 0)


def test_batches_that_leave_a_rest_are_refused_with_the_nearest_that_do_not() -> None:
    check_batches(6, 3)
    with pytest.raises(ConfigError, match=r"multiple of the 3 .* got 7; 6 and 9 are possible"):
        check_batches(7, 3)
