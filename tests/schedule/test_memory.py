"""What is kept at most, per stage and per rank."""

from __future__ import annotations

import pytest

from pipecomm.schedule import build
from pipecomm.schedule.memory import peak_activations, peak_per_rank
from tests.schedule.examples import schedule_of


def test_forward_only_schedule_keeps_no_activations() -> None:
    schedule = build("gpipe", 3, 5).forward_only()
    assert peak_activations(schedule) == (0, 0, 0)
    assert peak_per_rank(schedule, [1] * 3, [1] * 3) == (0, 0, 0)


def test_activations_of_several_stages_on_a_rank_are_counted_per_stage() -> None:
    schedule = schedule_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert peak_activations(schedule) == (2, 2, 1)


def test_activations_of_the_stages_of_a_rank_add_up() -> None:
    schedule = schedule_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert peak_per_rank(schedule, [1, 1, 1], [1, 1, 1]) == (3, 2)
    assert peak_per_rank(schedule, [10, 1, 0.5], [0, 0, 0]) == (20.5, 2)


def test_activations_of_a_split_backward_are_kept_until_its_weights_are_done() -> None:
    assert peak_activations(schedule_of("0F0 0I0 0F1 0W0 0I1 0W1")) == (2,)
    assert peak_activations(schedule_of("0F0 0I0 0W0 0F1 0I1 0W1")) == (1,)


@pytest.mark.parametrize(("held", "peak"), [(0.0, 10.0), (4.0, 14.0), (10.0, 20.0)])
def test_input_gradients_let_go_of_all_that_the_weights_do_not_need(
    held: float, peak: float
) -> None:
    assert peak_per_rank(schedule_of("0F0 0I0 0F1 0W0 0I1 0W1"), [10.0], [held]) == (peak,)


def test_more_held_for_weights_than_an_activation_counts_from_the_input_gradients_on() -> None:
    assert peak_per_rank(schedule_of("0F0 0I0 0W0"), [1.0], [3.0]) == (3.0,)


def test_1f1b_keeps_far_less_than_gpipe() -> None:
    one, all_ = (max(peak_activations(build(name, 4, 16))) for name in ("1f1b", "gpipe"))
    assert one <= 0.4 * all_
