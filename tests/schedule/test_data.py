"""A schedule as data: equality, size, and what is derived from its lists."""

from __future__ import annotations

import dataclasses

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Placement, Ranks, Schedule, Weights, build
from tests.schedule.examples import schedule_of


def test_schedules_with_the_same_lists_are_equal_whatever_their_names() -> None:
    built = build("1f1b", 2, 3)
    copied = Schedule("mine", 2, 3, built.ranks)
    assert copied == built
    assert hash(copied) == hash(built)
    assert built != build("gpipe", 2, 3)
    assert built != build("1f1b", 2, 4)


def test_schedule_given_lists_packs_them() -> None:
    schedule = Schedule("mine", 1, 1, [[Action(Kind.F, 0, 0)]])  # type: ignore[arg-type]
    assert schedule.ranks == ((Action(Kind.F, 0, 0),),)
    assert type(schedule.ranks) is Ranks


def test_lists_with_updates_are_those_of_stashed_weights_unless_said_otherwise() -> None:
    assert schedule_of("0F0 0B0").weights is Weights.ONE
    assert schedule_of("0F0 0B0 0U0").weights is Weights.STASHED
    updated = list(schedule_of("0F0 0B0 0U0").ranks)
    assert Schedule.from_lists("mine", updated, Weights.NEWEST).weights is Weights.NEWEST
    assert schedule_of("0F0 0B0 0U0").forward_only().weights is Weights.ONE


def test_schedule_repr_is_short_and_says_its_size() -> None:
    text = repr(build("1f1b", 4, 64))
    assert text == "Schedule('1f1b', num_stages=4, num_microbatches=64, num_ranks=4)"


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, "2"])
def test_schedule_with_a_count_below_one_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="num_stages to be an integer of at least 1"):
        Schedule("mine", count, 1, ())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_microbatches to be an integer of at least 1"):
        Schedule("mine", 1, count, ())  # type: ignore[arg-type]


def test_from_lists_counts_stages_and_microbatches() -> None:
    schedule = schedule_of("0F0 0F1 2F0", "1F0")
    assert (schedule.num_stages, schedule.num_microbatches) == (3, 2)


def test_from_lists_without_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_stages"):
        Schedule.from_lists("empty", [[], []])


def test_forward_only_keeps_the_order_of_the_forwards() -> None:
    schedule = build("1f1b", 2, 3).forward_only()
    assert schedule == schedule_of("0F0 0F1 0F2", "1F0 1F1 1F2")
    schedule.check()


def test_has_backward_is_false_only_without_backwards() -> None:
    assert build("gpipe", 2, 2).has_backward
    assert not build("gpipe", 2, 2).forward_only().has_backward


def test_placement_is_the_one_that_the_lists_say() -> None:
    assert build("gpipe", 3, 2).placement == Placement((0, 1, 2))
    assert schedule_of("0F0 2F0", "1F0").placement == Placement((0, 1, 0))


def test_kinds_are_those_that_occur() -> None:
    assert build("1f1b", 2, 2).kinds == {Kind.F, Kind.B}
    assert schedule_of("0F0 0I0 0W0").kinds == {Kind.F, Kind.I, Kind.W}


def test_schedule_of_split_backwards_has_a_backward() -> None:
    split = schedule_of("0F0 0I0 0W0")
    assert split.has_backward
    assert split.forward_only() == schedule_of("0F0")


def test_data_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        build("gpipe", 1, 1).num_microbatches = 2  # type: ignore[misc]
