"""What a rank is to do: the same order as the schedule, and what follows from its placement."""

from __future__ import annotations

import pytest

from pipecomm.engine.plan import check_schedule, evaluation_plan, training_plan
from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Placement, Schedule, build


def test_plan_of_training_has_the_actions_of_the_rank_and_says_where_a_stage_reduces() -> None:
    plan = training_plan(build("1f1b", 2, 3), 1)
    assert (plan.trains, plan.num_microbatches) == (True, 3)
    assert {action.stage for action in plan.actions} == {1}
    assert plan.reducing == {Action(Kind.B, 1, 2)}


def test_every_stage_of_a_rank_reduces_with_its_own_last_backward() -> None:
    rows = ["0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1"]
    ranks = [[Action.parse(text) for text in row.split()] for row in rows]
    plan = training_plan(Schedule.from_lists("mine", ranks), 0)
    assert plan.reducing == {Action(Kind.B, 0, 1), Action(Kind.B, 1, 1)}


def test_plan_of_evaluation_has_no_backward_and_any_number_of_microbatches() -> None:
    plan = evaluation_plan(Placement.looped(4, 2), 3, 1)
    assert (plan.trains, plan.num_microbatches, plan.reducing) == (False, 3, frozenset())
    forwards = [str(action) for action in plan.actions if action.kind.is_compute]
    assert forwards == ["1F0", "1F1", "3F0", "3F1", "1F2", "3F2"]


@pytest.mark.parametrize(
    ("rank_of", "max_open_sends"),
    [((0, 1, 2), 6), ((0, 0, 1, 1), 8), ((0, 1, 0, 1), None), ((0, 1, 1, 0), None)],
)
def test_sends_are_bounded_where_no_activation_comes_back_to_a_rank(
    rank_of: tuple[int, ...], max_open_sends: int | None
) -> None:
    assert evaluation_plan(Placement(rank_of), 1, 0).max_open_sends == max_open_sends


@pytest.mark.parametrize(
    ("name", "num_chunks", "kinds"),
    [("zb-h1", 1, "I, W"), ("zb-v", 2, "I, W"), ("pipedream", 1, "U")],
)
def test_named_schedule_that_is_not_executed_yet_is_refused_with_its_kinds(
    name: str, num_chunks: int, kinds: str
) -> None:
    with pytest.raises(ConfigError, match=f"a schedule of F and B; got {kinds} in '{name}'"):
        check_schedule(name, num_chunks, 0, 2, 4)


@pytest.mark.parametrize(("name", "num_chunks"), [("sequential", 1), ("looped-bfs", 2)])
def test_named_schedule_of_whole_backwards_is_taken(name: str, num_chunks: int) -> None:
    assert check_schedule(name, num_chunks, 0, 2, 4) == build(name, 2 * num_chunks, 4, 2)
