"""Planned lists: within their memory, and faster than 1F1B where links are slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, build
from pipecomm.schedule.memory import peak_per_rank

seconds = st.floats(0.0, 4.0).map(lambda value: round(value, 2))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 6), st.data())
def test_plan_is_executable_and_keeps_to_its_limit(
    P: int, M: int, limit: int, data: st.DataObject
) -> None:
    of_stages, of_links = (
        st.lists(seconds, min_size=count, max_size=count) for count in (P, max(P - 1, 0))
    )
    costs = Costs(
        data.draw(of_stages), data.draw(of_stages), data.draw(of_links), data.draw(of_links),
        latency_s=data.draw(seconds),
    )  # fmt: skip
    schedule = build("planned", P, M, costs=costs, max_activations=limit)
    schedule.check()
    assert max(schedule.peak_activations()) <= limit


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_plan_is_no_slower_than_1f1b_at_its_memory_when_links_cost_nothing(P: int) -> None:
    costs = Costs(1.0, 2.0)
    planned = build("planned", P, 16, costs=costs).simulate(costs)
    assert planned.step_s <= build("1f1b", P, 16).simulate(costs).step_s


def test_limit_per_rank_is_kept_by_each_rank() -> None:
    schedule = build("planned", 3, 9, max_activations=[3, 2, 1])
    peaks = peak_per_rank(schedule, [1] * 3, [1] * 3)
    assert all(peak <= limit for peak, limit in zip(peaks, (3, 2, 1), strict=True))


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (0, "max_activations to be an integer of at least 1; got 0"),
        ([1, 2], "one number or 3 of them for max_activations; got 2"),
    ],
)
def test_limit_that_cannot_be_is_refused(limit: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build("planned", 3, 4, max_activations=limit)


def test_option_of_another_schedule_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="planned: expected options: costs, max_activations; got"):
        build("planned", 2, 2, update_every=2)
    with pytest.raises(ConfigError, match="gpipe: expected options: none; got costs"):
        build("gpipe", 2, 2, costs=Costs())


# Forward 40 and 20 ms, backward twice that; messages of 256 KiB on the narrow link.
SLOW = {
    "20 ms": Costs(0.04, 0.08, latency_s=0.02),
    "200 Mbit/s": Costs(
        0.02, 0.04, forward_nbytes=2**18, backward_nbytes=2**18, link_bytes_per_s=25e6
    ),
}


@pytest.mark.parametrize("link", SLOW)
def test_plan_is_a_quarter_faster_than_1f1b_over_slow_links_at_its_memory(link: str) -> None:
    costs = SLOW[link]
    plain, planned = build("1f1b", 8, 32), build("planned", 8, 32, costs=costs)
    assert max(planned.peak_activations()) <= max(plain.peak_activations())
    assert plain.simulate(costs).step_s >= 1.25 * planned.simulate(costs).step_s


def test_plan_is_no_slower_than_the_orders_it_could_take() -> None:
    for costs in SLOW.values():
        planned = build("planned", 4, 16, costs=costs).simulate(costs).step_s
        assert planned <= build("zb-h1", 4, 16).simulate(costs).step_s
