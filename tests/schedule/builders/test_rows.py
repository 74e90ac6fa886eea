"""Rows that the named schedules share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipecomm.schedule import Kind
from pipecomm.schedule.builders.rows import alternating, of_each

counts = st.integers(1, 9)


def test_row_of_a_kind_has_each_microbatch_in_order() -> None:
    assert [str(action) for action in of_each(Kind.I, 2, 3)] == ["2I0", "2I1", "2I2"]


@given(counts, st.integers(0, 12))
def test_alternating_keeps_both_orders_and_the_warmup_in_front(
    num_microbatches: int, num_warmup: int
) -> None:
    forwards, backwards = (of_each(kind, 0, num_microbatches) for kind in (Kind.F, Kind.B))
    row = alternating(forwards, backwards, num_warmup)
    assert [action for action in row if action.kind is Kind.F] == forwards
    assert [action for action in row if action.kind is Kind.B] == backwards
    first = row.index(backwards[0])
    # The first backward follows the warmup and one more forward, if there is one.
    assert first == min(num_warmup + 1, num_microbatches)


@given(counts, st.integers(0, 12))
def test_alternating_never_has_more_open_than_the_warmup_and_one(
    num_microbatches: int, num_warmup: int
) -> None:
    forwards, backwards = (of_each(kind, 0, num_microbatches) for kind in (Kind.F, Kind.B))
    num_open = peak = 0
    for action in alternating(forwards, backwards, num_warmup):
        num_open += action.kind.change_in_live
        peak = max(peak, num_open)
    assert num_open == 0
    assert peak == min(num_warmup + 1, num_microbatches)
