"""Predicted steps: by hand, by formula, and that no prediction breaks what holds for any step."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, Kind, Schedule, Simulation, build, with_communication
from tests.schedule.examples import schedule_of


def times(result: Simulation) -> dict[str, tuple[float, float]]:
    return {str(event.action): (event.start_s, event.end_s) for event in result.events}


def test_two_stages_with_transfers_match_the_drawing() -> None:
    #  0 F0 F1 - - - - - B0 B0 - B1 B1     F 1 s, B 2 s, forward transfer 2 s, backward 1 s
    #  1 - - - F0 B0 B0 F1 B1 B1
    costs = Costs(1.0, 2.0, forward_transfer_s=2.0, backward_transfer_s=1.0)
    result = build("1f1b", 2, 2).simulate(costs)
    assert times(result) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0SEND_F0": (1, 3),
        "1F0": (3, 4),
        "0SEND_F1": (3, 5),
        "1B0": (4, 6),
        "1SEND_B0": (6, 7),
        "1F1": (6, 7),
        "1B1": (7, 9),
        "0B0": (7, 9),
        "1SEND_B1": (9, 10),
        "0B1": (10, 12),
    }
    assert result.step_s == 12
    assert result.rank_bubbles == pytest.approx((0.5, 0.5))
    assert result.bubble == pytest.approx(0.5)
    # Rank 0 stands still 2..7 and 9..10; the link is under way for it in 6..7 and 9..10.
    assert result.exposed_comm_s == pytest.approx((2.0, 2.0))


def test_events_are_in_order_of_their_start() -> None:
    events = build("1f1b", 4, 6).simulate(Costs(1, 2, 0.5, 0.5)).events
    assert list(events) == sorted(events, key=lambda event: (event.start_s, event.rank))


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
@pytest.mark.parametrize("transfer_s", [0.0, 0.25, 1.0])
def test_overlapped_transfers_cost_only_the_way_down_and_up(name: str, transfer_s: float) -> None:
    num_stages, num_microbatches = 4, 16
    costs = Costs(1.0, 2.0, transfer_s, transfer_s)
    step_s = build(name, num_stages, num_microbatches).simulate(costs).step_s
    compute_s = (num_microbatches + num_stages - 1) * 3.0
    assert step_s == pytest.approx(compute_s + 2 * (num_stages - 1) * transfer_s)


def test_plain_1f1b_cannot_hide_transfers_in_its_steady_phase() -> None:
    costs = Costs(1.0, 2.0, 0.5, 0.5)
    plain = build("1f1b", 4, 64).simulate(costs)
    eager = build("eager-1f1b", 4, 64).simulate(costs)
    # Stage 0 has P microbatches under way, and each needs 2(P-1) transfers to come back.
    per_round = 4 * 3.0 + 6 * 0.5
    assert plain.step_s > 64 / 4 * per_round
    assert plain.step_s > eager.step_s * 1.2
    assert plain.exposed_comm_s[0] > 5 * eager.exposed_comm_s[0]


def test_messages_of_one_direction_follow_one_another_on_the_link() -> None:
    result = build("gpipe", 2, 4).forward_only().simulate(Costs(1.0, forward_transfer_s=5.0))
    assert [times(result)[f"0SEND_F{m}"] for m in range(4)] == [(1, 6), (6, 11), (11, 16), (16, 21)]
    assert result.step_s == 22
    assert result.exposed_comm_s == pytest.approx((0.0, 17.0))


def test_both_directions_of_a_link_run_at_once() -> None:
    result = build("1f1b", 2, 3).simulate(Costs(1.0, 1.0, 3.0, 3.0))
    forward, backward = times(result)["0SEND_F1"], times(result)["1SEND_B0"]
    assert max(forward[0], backward[0]) < min(forward[1], backward[1])


def test_latency_is_shared_by_messages_that_are_under_way_together() -> None:
    costs = {"forward_s": 1.0, "forward_transfer_s": 1.0, "latency_s": 10.0}
    schedule = build("gpipe", 2, 3).forward_only()
    without_slots, with_slots = (schedule.simulate(Costs(**costs, slots=n)) for n in (0, 2))
    assert times(without_slots)["0SEND_F1"] == (2, 13)
    # Its receive is posted when microbatch 0, which arrives at 12, has been computed.
    assert times(without_slots)["0SEND_F2"] == (13, 24)
    assert times(with_slots)["0SEND_F2"] == (3, 14)
    assert with_slots.step_s == 15


def test_without_overlap_a_sender_stands_still() -> None:
    costs = {"forward_s": 1.0, "forward_transfer_s": 2.0}
    schedule = build("gpipe", 2, 2).forward_only()
    held = schedule.simulate(Costs(**costs, overlap=False))
    free = schedule.simulate(Costs(**costs))
    assert times(held)["0F1"] == (3, 4)
    assert times(free)["0F1"] == (1, 2)
    assert held.exposed_comm_s[0] == pytest.approx(4.0)
    assert free.exposed_comm_s[0] == 0.0
    assert (held.step_s, free.step_s) == (7, 6)


def test_order_that_needs_overlap_is_refused_without_it() -> None:
    rows = (" ".join(f"{s}F{m}" for s in (r, r + 2) for m in range(6)) for r in range(2))
    schedule = schedule_of(*rows)
    assert schedule.simulate().step_s == 13
    with pytest.raises(ConfigError, match="blocking sends"):
        schedule.simulate(Costs(overlap=False))


def test_costs_per_stage_and_per_link_reach_their_place() -> None:
    costs = Costs([1, 2, 3], [4, 5, 6], [10, 20], [30, 40])
    assert {text: end - start for text, (start, end) in times(
        build("gpipe", 3, 1).simulate(costs)
    ).items()} == {
        "0F0": 1, "1F0": 2, "2F0": 3, "0B0": 4, "1B0": 5, "2B0": 6,
        "0SEND_F0": 10, "1SEND_F0": 20, "1SEND_B0": 30, "2SEND_B0": 40,
    }  # fmt: skip


def test_parts_of_a_backward_cost_half_of_it_unless_they_are_given() -> None:
    schedule = schedule_of("0F0 0I0 0W0")
    assert times(schedule.simulate(Costs(1.0, 3.0))) == {
        "0F0": (0, 1), "0I0": (1, 2.5), "0W0": (2.5, 4),
    }  # fmt: skip
    given = Costs(1.0, 3.0, backward_input_s=[2.0], backward_weight_s=5.0)
    assert times(schedule.simulate(given)) == {"0F0": (0, 1), "0I0": (1, 3), "0W0": (3, 8)}


def test_weights_done_while_others_wait_make_the_bubble_smaller() -> None:
    whole = build("1f1b", 2, 4)
    # The last rank's weights wait until the other rank has its gradients.
    split = schedule_of(
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    )
    costs = Costs(1.0, 2.0)
    assert split.simulate(costs).step_s < whole.simulate(costs).step_s


def test_slowest_stage_sets_the_pace() -> None:
    slow = build("1f1b", 4, 32).simulate(Costs([1, 1.15, 1, 1], [2, 2.3, 2, 2]))
    # All of its work, between one forward and one backward of stage 0; at worst a whole
    # microbatch through all stages and the rest at the slow stage's pace.
    assert 32 * 3.45 + 3 <= slow.step_s <= 31 * 3.45 + 12.45
    assert slow.rank_bubbles[1] < min(slow.rank_bubbles[k] for k in (0, 2, 3))


def test_single_stage_never_idles() -> None:
    result = build("1f1b", 1, 4).simulate(Costs(1.0, 2.0, latency_s=5.0))
    assert (result.step_s, result.bubble, result.exposed_comm_s) == (12, 0, (0.0,))


def test_step_that_takes_no_time_has_no_bubble() -> None:
    result = build("1f1b", 2, 2).simulate(Costs(0.0, 0.0))
    assert (result.step_s, result.bubble) == (0, 0)


def test_a_thousand_ranks_take_the_time_of_the_formula() -> None:
    result = build("1f1b", 1000, 32).simulate(Costs(1.0, 2.0))
    assert result.step_s == pytest.approx((32 + 999) * 3.0)
    assert result.bubble == pytest.approx(999 / 1031)
    assert len(result.events) == 2 * 32 * (1000 + 999)


def test_broken_schedule_is_refused_before_it_is_simulated() -> None:
    with pytest.raises(ConfigError, match="missing: 0B0"):
        schedule_of("0F0", "1F0 1B0").simulate()


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (Costs(-1.0), "0 or more for forward_s; got -1"),
        (Costs(backward_s=math.nan), "for backward_s; got nan"),
        (Costs(forward_s=math.inf), "for forward_s; got inf"),
        (Costs(forward_s=[1, 2]), "one number or 3 of them for forward_s; got 2"),
        (Costs(backward_transfer_s=[1, 2, 3]), "2 of them for backward_transfer_s; got 3"),
        (Costs(forward_transfer_s=[1, -2]), "for forward_transfer_s; got -2"),
        (Costs(latency_s=-0.1), "for latency_s; got -0.1"),
        (Costs(slots=-1), "slots of 0 or more; got -1"),
        (Costs(backward_input_s=[1, 2]), "3 of them for backward_input_s; got 2"),
        (Costs(backward_weight_s=-2.0), "for backward_weight_s; got -2"),
    ],
)
def test_costs_that_cannot_be_are_refused_by_name(costs: Costs, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build("gpipe", 3, 2).simulate(costs)


seconds = st.floats(0.0, 4.0).map(lambda value: round(value, 2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    num_stages = draw(st.integers(1, 4))
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]))
    schedule = build(name, num_stages, draw(st.integers(1, 6)))
    each = [st.lists(seconds, min_size=n, max_size=n) for n in (num_stages, num_stages - 1)]
    costs = Costs(
        draw(each[0]), draw(each[0]), draw(each[1]), draw(each[1]),
        latency_s=draw(seconds), overlap=draw(st.booleans()), slots=draw(st.integers(0, 2)),
    )  # fmt: skip
    return schedule, costs


@settings(max_examples=150, deadline=None)
@given(cases())
def test_prediction_keeps_causality_and_one_thing_at_a_time(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    result = schedule.simulate(costs)
    spans = times(result)
    lanes: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for event in result.events:
        kind = event.action.kind
        is_send = not kind.is_compute
        end = event.end_s - costs.latency_s * is_send
        lanes[event.rank, kind if is_send else None].append((event.start_s, end))
    for lane in map(sorted, lanes.values()):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lane))
    for text, (start, _) in spans.items():
        source = input_of(text, schedule.num_stages)
        assert source is None or start >= spans[source][1] - 1e-9
    assert result.step_s == max(end for _, end in spans.values())


def input_of(text: str, num_stages: int) -> str | None:
    """What must have ended before the action starts: a compute's message, a send's compute."""
    if "SEND" in text:
        return text.replace("SEND_", "")
    kind = "F" if "F" in text else "B"
    stage, microbatch = map(int, text.split(kind))
    source = stage - 1 if kind == "F" else stage + 1
    return f"{source}SEND_{kind}{microbatch}" if 0 <= source < num_stages else None


@settings(max_examples=100, deadline=None)
@given(cases())
def test_idle_time_holds_the_exposed_communication(case: tuple[Schedule, Costs]) -> None:
    result = case[0].simulate(case[1])
    for bubble, exposed_s in zip(result.rank_bubbles, result.exposed_comm_s, strict=True):
        assert -1e-9 <= exposed_s <= bubble * result.step_s + 1e-9


def test_every_send_of_the_lowered_lists_becomes_an_event() -> None:
    schedule = build("1f1b", 3, 4)
    sends = {
        action
        for row in with_communication(schedule)
        for action in row
        if action.kind in (Kind.SEND_F, Kind.SEND_B)
    }
    events = schedule.simulate().events
    assert {event.action for event in events if not event.action.kind.is_compute} == sends
