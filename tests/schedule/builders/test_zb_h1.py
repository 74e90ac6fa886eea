"""ZB-H1: the paper's bubble and memory."""

from __future__ import annotations

import itertools

import pytest

from pipecomm.schedule import Costs, build


def idle_s(name: str, P: int, M: int, costs: Costs) -> float:
    result = build(name, P, M).simulate(costs)
    return result.bubble * result.step_s


def test_bubble_is_the_formula_at_1f1bs_memory() -> None:
    for P, M in itertools.product(range(1, 9), range(1, 17)):
        if M >= P:
            schedule = build("zb-h1", P, M)
            result = schedule.simulate(Costs(1.0, 2.0))
            assert result.bubble * result.step_s == pytest.approx((P - 1) * (1 + 1 - 1)), (P, M)
            assert max(schedule.peak_activations()) <= P


@pytest.mark.parametrize(("P", "M"), [(4, 8), (4, 16), (8, 32)])
def test_idle_time_is_a_third_of_1f1bs_with_equal_parts(P: int, M: int) -> None:
    costs = Costs(1.0, 2.0)
    assert idle_s("zb-h1", P, M, costs) <= 0.4 * idle_s("1f1b", P, M, costs)


@pytest.mark.parametrize("weight_s", [0.25, 0.5, 0.75])
def test_weights_cheaper_than_the_rest_leave_more_of_the_bubble(weight_s: float) -> None:
    costs = Costs(1.0, 1.0 + weight_s, backward_input_s=1.0, backward_weight_s=weight_s)
    expected = 3 * (1 + 1 - weight_s)
    assert idle_s("zb-h1", 4, 16, costs) == pytest.approx(expected, rel=0.02)
    assert idle_s("1f1b", 4, 16, costs) == pytest.approx(3 * (2 + weight_s))
