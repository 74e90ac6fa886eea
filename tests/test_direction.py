"""There are two directions, each the other's opposite, and one type for them."""

from __future__ import annotations

from typing import get_args

from pipecomm import schedule
from pipecomm.direction import OPPOSITE, Direction


def test_directions_are_each_others_opposite() -> None:
    assert {*OPPOSITE} == {*get_args(Direction)} == {"forward", "backward"}
    assert all(OPPOSITE[OPPOSITE[one]] == one != OPPOSITE[one] for one in OPPOSITE)


def test_schedules_mean_the_same_directions() -> None:
    assert schedule.Direction is Direction
    assert {kind.direction for kind in schedule.Kind} == {"forward", "backward", None}
