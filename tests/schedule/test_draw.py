"""Drawings: what a cell says, and that every action is in its slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipecomm.schedule import Schedule
from tests.schedule.examples import SMALL_SCHEDULES, schedule_of


def test_cell_names_the_stage_where_a_rank_has_several() -> None:
    assert schedule_of("0F0 2F0", "1F0").draw() == (
        "slot     0   1   2\nrank 0 0F0   . 2F0\nrank 1   . 1F0   ."
    )


def test_parts_of_a_backward_take_a_slot_each_and_a_whole_one_two() -> None:
    assert schedule_of("0F0 0B0", "1F0 1I0 1W0").draw() == (
        "slot    0  1  2  3  4\nrank 0 F0  .  . B0 B0\nrank 1  . F0 I0 W0  ."
    )


def test_schedule_for_evaluation_has_forwards_only() -> None:
    assert schedule_of("0F0 0F1", "1F0 1F1").draw() == (
        "slot    0  1  2\nrank 0 F0 F1  .\nrank 1  . F0 F1"
    )


@given(st.sampled_from(SMALL_SCHEDULES))
def test_each_row_has_its_ranks_actions_in_order_and_all_columns_are_as_wide(
    schedule: Schedule,
) -> None:
    header, *rows = schedule.draw().splitlines()
    assert len({len(row) for row in (header, *rows)}) == 1
    for rank, row in enumerate(rows):
        label, number, *cells = row.split()
        assert (label, int(number)) == ("rank", rank)
        assert [f"{rank}{cell}" for cell in cells if cell != "."] == [
            str(action) for action in schedule.ranks[rank]
        ]
