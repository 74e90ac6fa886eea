"""What holds for any prediction: bounds, and that nothing gets faster by costing more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.schedule import Costs, Kind, Schedule, build

seconds = st.floats(0.0, 4.0).map(lambda value: round(value, 2))
NAMES = ("sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-v", "looped-bfs", "interleaved")
SECONDS = (
    *("forward_s", "backward_s", "backward_input_s", "backward_weight_s"),
    *("forward_transfer_s", "backward_transfer_s", "latency_s", "codec_s", "reduce_s"),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    name, num_ranks = draw(st.sampled_from(NAMES)), draw(st.integers(1, 3))
    num_stages = num_ranks * (2 if name in ("zb-v", "looped-bfs") else 1)
    schedule = build(name, num_stages, draw(st.integers(1, 6)), num_ranks)
    each = {
        name: st.lists(seconds, min_size=count, max_size=count)
        for name in SECONDS
        for count in [num_stages - ("transfer" in name or name in ("latency_s", "codec_s"))]
    }
    costs = Costs(**{name: draw(values) for name, values in each.items()})
    return schedule, replace(costs, slots=draw(st.integers(0, 2)))


@settings(max_examples=120, deadline=None)
@given(cases())
def test_step_is_no_shorter_than_the_busiest_rank_and_one_microbatchs_way(
    case: tuple[Schedule, Costs],
) -> None:
    schedule, costs = case
    result = schedule.simulate(costs)
    seconds_of = {
        Kind.F: costs.forward_s, Kind.B: costs.backward_s,
        Kind.I: costs.backward_input_s, Kind.W: costs.backward_weight_s,
    }  # fmt: skip
    busiest_s = max(
        sum(seconds_of[action.kind][action.stage] for action in row)  # type: ignore[index]
        for row in schedule.ranks
    )
    assert result.step_s >= busiest_s - 1e-9
    # Down through all stages and up again, by whichever form the backwards have.
    up = costs.backward_input_s if Kind.I in schedule.kinds else costs.backward_s
    least = [min(pair) for pair in zip(up, costs.backward_s, strict=True)]  # type: ignore[arg-type]
    assert result.step_s >= sum(costs.forward_s) + sum(least) - 1e-9  # type: ignore[arg-type]
    assert 0 <= result.bubble <= 1 + 1e-9
    assert 0 <= result.exposed_reduce_s <= sum(costs.reduce_s) + 1e-9  # type: ignore[arg-type]


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from(SECONDS), st.data())
def test_step_gets_no_shorter_when_anything_costs_more(
    case: tuple[Schedule, Costs], name: str, data: st.DataObject
) -> None:
    schedule, costs = case
    values = list(getattr(costs, name))
    if values:
        values[data.draw(st.integers(0, len(values) - 1))] += data.draw(seconds)
    more = schedule.simulate(replace(costs, **{name: values})).step_s
    assert more >= schedule.simulate(costs).step_s - 1e-9


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3))
def test_step_gets_no_shorter_when_fewer_messages_may_be_on_their_way(
    case: tuple[Schedule, Costs], limit: int
) -> None:
    schedule, costs = case
    free = schedule.simulate(costs).step_s
    assert schedule.simulate(replace(costs, max_in_flight=limit)).step_s >= free - 1e-9


@pytest.mark.parametrize(("P", "M"), [(4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_bubble_is_1f1bs_over_the_stages_per_rank(P: int, M: int, v: int) -> None:
    def idle_s(name: str, parts: int) -> float:
        costs = Costs(1.0 / parts, 2.0 / parts)
        result = build(name, parts * P, M, P).simulate(costs)
        return result.bubble * result.step_s

    assert idle_s("interleaved", v) <= 1.05 / v * idle_s("1f1b", 1)


def test_reductions_of_a_rank_begin_with_its_stages_last_backwards_and_follow_one_another() -> None:
    # Rank 0 ends 2B0 at 4 and 0B0 at 6; rank 1 ends at 5.
    from tests.schedule.examples import schedule_of

    schedule = schedule_of("0F0 2F0 2B0 0B0", "1F0 1B0")
    plain = schedule.simulate()
    assert plain.step_s == 6
    reduced = schedule.simulate(Costs(reduce_s=[1.0, 2.0, 3.0]))
    # Stage 2's runs from 4 to 7, stage 0's from 7 to 8, stage 1's from 5 to 7.
    assert reduced.step_s == 8
    assert reduced.exposed_reduce_s == 2
    assert schedule.simulate(Costs(reduce_s=[0.0, 1.0, 2.0])).exposed_reduce_s == 0


def test_memory_is_weights_in_all_their_versions_and_the_activations() -> None:
    costs = Costs(activation_nbytes=[10, 20], weights_nbytes=[100, 200])
    assert build("1f1b", 2, 4).simulate(costs).peak_nbytes == (120, 220)
    assert build("pipedream", 2, 4).simulate(costs).peak_nbytes == (220, 220)
    assert build("pipedream-2bw", 2, 4).simulate(costs).peak_nbytes == (220, 420)


def test_messages_between_ranks_are_counted() -> None:
    assert build("1f1b", 4, 8).simulate().num_messages == 2 * 3 * 8
    # In a V one of the seven boundaries is inside a rank.
    assert build("zb-v", 8, 8).simulate().num_messages == 2 * 6 * 8
