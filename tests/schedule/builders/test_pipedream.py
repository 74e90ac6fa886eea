"""PipeDream: 1F1B's order with an update after each backward."""

from __future__ import annotations

from pipecomm.schedule import Kind, build


def test_lists_are_1f1bs_with_an_update_after_each_backward() -> None:
    schedule = build("pipedream", 3, 5)
    for row, plain in zip(schedule.ranks, build("1f1b", 3, 5).ranks, strict=True):
        assert [action for action in row if action.kind is not Kind.U] == list(plain)
        for place, action in enumerate(row):
            if action.kind is Kind.B:
                assert row[place + 1] == action._replace(kind=Kind.U)
