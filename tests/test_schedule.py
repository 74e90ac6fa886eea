"""Actions and schedules as data: text form, equality, what is derived from the lists."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Schedule, build
from tests.schedule_examples import schedule_of


@pytest.mark.parametrize("kind", list(Kind))
def test_action_of_each_kind_prints_and_parses_back(kind: Kind) -> None:
    action = Action(kind, 12, 305)
    assert str(action) == f"12{kind.name}305"
    assert Action.parse(str(action)) == action


def test_action_with_spaces_around_parses() -> None:
    assert Action.parse(" 0F3 ") == Action(Kind.F, 0, 3)


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0f1", "-1F0", "0F0.5", "0F1 0F2", "0B1B", "\u0661F0", "0F" + "9" * 5000],
)
def test_action_text_without_stage_kind_microbatch_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an action as stage, kind, microbatch"):
        Action.parse(text)


@pytest.mark.parametrize("kind", ["I", "W", "UNSHARD", "X"])
def test_action_of_unknown_kind_names_the_known_ones(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"F, B, SEND_F, RECV_F, SEND_B, RECV_B; got '{kind}'"):
        Action.parse(f"0{kind}0")


def test_only_forward_and_backward_are_compute() -> None:
    assert [kind for kind in Kind if kind.is_compute] == [Kind.F, Kind.B]


def test_schedules_with_the_same_lists_are_equal_whatever_their_names() -> None:
    built = build("1f1b", 2, 3)
    copied = Schedule("mine", 2, 3, built.ranks)
    assert copied == built
    assert hash(copied) == hash(built)
    assert built != build("gpipe", 2, 3)
    assert built != build("1f1b", 2, 4)


def test_schedule_given_lists_keeps_tuples() -> None:
    schedule = Schedule("mine", 1, 1, [[Action(Kind.F, 0, 0)]])  # type: ignore[arg-type]
    assert schedule.ranks == ((Action(Kind.F, 0, 0),),)


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


def test_forward_only_schedule_keeps_no_activations() -> None:
    assert build("gpipe", 3, 5).forward_only().peak_activations() == (0, 0, 0)


def test_peak_activations_of_several_stages_on_a_rank_are_counted_per_stage() -> None:
    schedule = schedule_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert schedule.peak_activations() == (2, 2, 1)


def test_examples_of_the_schedule_page_run_as_written() -> None:
    page = Path(__file__).parent.parent / "docs" / "schedules.md"
    text = page.read_text().replace("```python\n", "\n").replace("\n```", "\n")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=report.append)
    assert len(examples.examples) > 8
    assert report == []
