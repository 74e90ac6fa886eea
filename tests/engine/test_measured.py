"""Times of a step become the costs that a simulation takes, each at its stage or boundary."""

from __future__ import annotations

import pytest
import torch

from pipecomm.engine.measured import costs_of, own_times
from pipecomm.engine.stats import StepStats
from pipecomm.schedule import Action, Placement, build
from tests.engine.finished_transfer import FinishedTransfer


def stats_of(*actions: tuple[str, float]) -> StepStats:
    stats = StepStats()
    for text, seconds in actions:
        stats.add_compute(Action.parse(text), 10.0, 10.0 + seconds)
    return stats


def test_an_action_costs_its_mean_on_its_stage() -> None:
    placement = Placement.linear(2, 2)
    first = own_times(stats_of(("0F0", 1), ("0F1", 3), ("0B0", 5)), placement)
    second = own_times(stats_of(("1F0", 4), ("1B0", 6)), placement)
    costs = costs_of([first, second])
    assert costs.forward_s == [2, 4]
    assert costs.backward_s == [5, 6]
    assert costs.backward_input_s is None


def test_parts_of_a_backward_make_the_whole() -> None:
    times = own_times(stats_of(("0F0", 1), ("0I0", 2), ("0W0", 3)), Placement.linear(1, 1))
    costs = costs_of([times])
    assert (costs.backward_s, costs.backward_input_s, costs.backward_weight_s) == ([5], [2], [3])


def test_an_update_costs_what_it_took() -> None:
    times = own_times(stats_of(("0F0", 1), ("0B0", 1), ("0U0", 7)), Placement.linear(1, 1))
    assert costs_of([times]).update_s == [7]


def test_a_message_belongs_to_the_boundary_that_it_crossed() -> None:
    placement = Placement.linear(3, 3)
    stats = [StepStats() for _ in range(3)]
    # Activations into stages 1 and 2, gradients into stages 0 and 1.
    for rank, text, seconds in ((1, "1F0", 1), (2, "2F0", 2), (0, "0B0", 3), (1, "1B0", 4)):
        transfer = FinishedTransfer(5.0, 5.0 + seconds)
        stats[rank].add_transfer("recv", Action.parse(text), transfer, None)
    costs = costs_of([own_times(one, placement) for one in stats])
    assert costs.forward_transfer_s == [1, 2]
    assert costs.backward_transfer_s == [3, 4]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "pipedream"])
def test_costs_fit_a_simulation_whatever_was_measured(name: str) -> None:
    schedule = build(name, 3, 6)
    nothing = torch.full_like(own_times(StepStats(), schedule.placement), torch.nan)
    assert schedule.simulate(costs_of([nothing] * 3)).step_s == 0
