"""What a rank is to do: the same order as the schedule, and what follows from its placement."""

from __future__ import annotations

import pytest

from pipecomm.engine.plan import check_schedule, evaluation_plan, training_plan
from pipecomm.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    build,
    known_schedules,
)

TWO_STAGES = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")


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
    ("name", "num_chunks"),
    [(name, 1) for name in known_schedules() if name not in TWO_STAGES]
    + [(name, 2) for name in TWO_STAGES],
)
def test_every_named_schedule_is_taken(name: str, num_chunks: int) -> None:
    assert check_schedule(name, num_chunks, 0, 2, 4) == build(name, 2 * num_chunks, 4, 2)


def test_split_stage_reduces_with_its_last_weight_gradients() -> None:
    plan = training_plan(build("zb-h1", 2, 3), 1)
    assert plan.reducing == {Action(Kind.W, 1, 2)}
    assert plan.splits
    assert not training_plan(build("1f1b", 2, 3), 1).splits


def test_plan_of_asynchronous_training_says_which_version_each_action_uses() -> None:
    plan = training_plan(build("pipedream", 2, 3), 0)
    used = {str(action): version for action, version in plan.versions.items()}
    # One update late; an update has the version that its gradients were computed with.
    assert used == {
        "0F0": 0,
        "0F1": 0,
        "0F2": 1,
        "0B0": 0,
        "0B1": 0,
        "0B2": 1,
        "0U0": 0,
        "0U1": 0,
        "0U2": 1,
    }
    assert plan.uses(0) == {0: 6, 1: 3}
    assert (plan.is_asynchronous, plan.updates) == (True, (0, 1, 2))


def test_updates_are_those_of_the_schedule_on_every_rank() -> None:
    schedule = build("pipedream-2bw", 2, 6, update_every=3)
    assert [training_plan(schedule, rank).updates for rank in (0, 1)] == [(2, 5)] * 2


def test_plan_of_synchronous_training_has_no_versions() -> None:
    plan = training_plan(build("1f1b", 2, 3), 0)
    assert (plan.is_asynchronous, plan.versions, plan.uses(0)) == (False, {}, {})
