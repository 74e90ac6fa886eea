"""Schedules side by side, and which one to take."""

from __future__ import annotations

import pytest

from pipecomm.schedule import Costs, best, candidates, known_schedules

COSTS = Costs(1.0, 2.0)


def test_every_schedule_is_there_with_a_prediction_or_the_reason_why_not() -> None:
    found = candidates(4, 6, COSTS)
    assert [candidate.name for candidate in found] == list(known_schedules())
    refused = {candidate.name: candidate.refusal for candidate in found if candidate.refusal}
    assert set(refused) == {"dualpipe-v", "pipedream-2bw", "paci"}
    assert "8 and more are possible" in refused["dualpipe-v"]
    assert all((c.simulation is None) == bool(c.refusal) for c in found)


def test_two_stages_on_a_rank_share_its_work_and_its_memory() -> None:
    found = {candidate.name: candidate for candidate in candidates(4, 8, COSTS)}
    busy = {
        name: c.simulation.step_s * (1 - c.simulation.bubble)
        for name, c in found.items()
        if c.simulation is not None
    }
    assert list(busy.values()) == pytest.approx([24.0] * len(busy))
    assert found["zb-v"].peak_activations == found["1f1b"].peak_activations == 4


@pytest.mark.parametrize(
    ("limit", "name"), [(None, "zb-v"), (4, "zb-v"), (3, "sequential"), (1, "sequential")]
)
def test_fastest_within_the_limit_is_taken(limit: float | None, name: str) -> None:
    chosen = best(candidates(4, 8, COSTS), limit, in_bytes=False)
    assert chosen is not None
    assert chosen.name == name


def test_none_is_taken_when_none_fits() -> None:
    assert best(candidates(4, 8, COSTS), 0.5, in_bytes=False) is None
    weights = Costs(weights_nbytes=100)
    assert best(candidates(2, 4, weights), 99) is None
    assert best(candidates(2, 4, weights), 100) is not None


def test_schedules_with_several_updates_a_step_are_shown_and_not_taken() -> None:
    found = [c for c in candidates(2, 4, COSTS) if not c.is_synchronous]
    assert {c.name for c in found} == {"pipedream", "pipedream-2bw", "paci"}
    assert best(found) is None


def test_slow_links_make_another_schedule_the_best() -> None:
    slow = Costs(1.0, 2.0, 2.0, 2.0)
    chosen = best(candidates(4, 16, slow), 4, in_bytes=False)
    assert chosen is not None
    assert chosen.name == "planned"
