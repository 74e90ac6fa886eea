"""Naive model parallelism: nothing runs at the same time."""

from __future__ import annotations

import pytest

from pipecomm.schedule import Costs, build


@pytest.mark.parametrize(("P", "M"), [(1, 3), (4, 8), (8, 2)])
def test_step_is_the_sum_of_all_work(P: int, M: int) -> None:
    schedule = build("sequential", P, M)
    result = schedule.simulate(Costs(1.0, 2.0, 0.5, 0.25))
    assert result.step_s == pytest.approx(M * (3 * P + 0.75 * (P - 1)))
    assert schedule.peak_activations() == (1,) * P
