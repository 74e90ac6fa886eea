"""The walk itself: what waits for what, on lists small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipecomm.schedule import Kind, build
from pipecomm.schedule.walk import Event, Stuck, Timing, walk
from tests.schedule.examples import schedule_of

SECONDS = {Kind.F: 1.0, Kind.B: 3.0, Kind.I: 1.0, Kind.W: 2.0, Kind.U: 0.0}


def timing(
    num_stages: int, transfer_s: float = 0.0, latency_s: float = 0.0, slots: int = 0,
    max_in_flight: int = 0, sends_block: bool = False,
) -> Timing:  # fmt: skip
    compute_s = np.zeros((len(Kind), num_stages))
    for kind, seconds in SECONDS.items():
        compute_s[kind.index] = seconds
    of_messages = np.ones((2, num_stages))
    return Timing(
        compute_s, transfer_s * of_messages, latency_s * of_messages, slots, max_in_flight,
        sends_block,
    )  # fmt: skip


def times(events: object) -> dict[str, tuple[float, float]]:
    return {str(event.action): (event.start_s, event.end_s) for event in events}  # type: ignore[attr-defined]


def test_timing_has_seconds_for_every_kind_that_computes() -> None:
    assert set(SECONDS) == {kind for kind in Kind if kind.is_compute}


def test_gradient_leaves_after_the_input_part_of_a_backward() -> None:
    walked = walk(schedule_of("0F0 0B0", "1F0 1I0 1W0"), timing(2))
    spans = times(walked.events())
    assert spans["1SEND_B0"] == (3, 3), "after I, not after W"
    assert spans["0B0"] == (3, 6)
    assert spans["1W0"] == (3, 5)
    assert walked.clock_s.tolist() == [6, 5]
    assert walked.busy_s.tolist() == [4, 4]


def test_weights_wait_for_nothing_of_other_ranks() -> None:
    walked = walk(schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0"), timing(2, transfer_s=5.0))
    assert times(walked.events())["1W0"] == (8, 10)


def test_stages_of_one_rank_hand_over_in_no_time() -> None:
    walked = walk(schedule_of("0F0 1F0 1B0 0B0"), timing(2, transfer_s=9.0, latency_s=9.0))
    assert times(walked.events()) == {"0F0": (0, 1), "1F0": (1, 2), "1B0": (2, 5), "0B0": (5, 8)}


def test_messages_of_two_stages_between_the_same_ranks_follow_one_another() -> None:
    schedule = schedule_of("0F0 0F1 0F2 2F0 2F1 2F2", "1F0 1F1 1F2 3F0 3F1 3F2")
    spans = times(walk(schedule, timing(4, transfer_s=4.0)).events())
    sends = ["0SEND_F0", "0SEND_F1", "0SEND_F2", "2SEND_F0"]
    assert spans["2F0"] == (10, 11)
    assert [spans[send] for send in sends] == [(1, 5), (5, 9), (9, 13), (13, 17)]
    # The link back from rank 1 to rank 0 is another one.
    assert spans["1SEND_F0"] == (6, 10)


def test_rank_that_makes_its_own_input_later_is_stuck_at_its_place() -> None:
    with pytest.raises(Stuck) as caught:
        walk(schedule_of("1F0 0F0"), timing(2))
    assert caught.value.positions == {0: 0}


def test_ranks_that_wait_for_each_other_are_stuck_at_their_places_in_the_lowered_lists() -> None:
    with pytest.raises(Stuck) as caught:
        walk(schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), timing(2))
    assert caught.value.positions == {0: 4, 1: 3}


def test_rank_held_by_its_own_send_is_stuck_at_the_send() -> None:
    rows = (" ".join(f"{s}F{m}" for s in (r, r + 2) for m in range(6)) for r in range(2))
    with pytest.raises(Stuck) as caught:
        walk(schedule_of(*rows), timing(4, sends_block=True))
    assert set(caught.value.positions) == {0, 1}


def test_slots_let_messages_leave_before_their_receive_is_posted() -> None:
    schedule = schedule_of("0F0 0F1 0F2", "1F0 1F1 1F2")
    rows = [times(walk(schedule, timing(2, 1.0, 10.0, slots)).events()) for slots in (0, 1)]
    assert [row["0SEND_F2"] for row in rows] == [(13, 24), (3, 14)]


def test_messages_on_their_way_are_no_more_than_the_limit() -> None:
    schedule = schedule_of("0F0 0F1 0F2", "1F0 1F1 1F2")
    spans = times(walk(schedule, timing(2, 1.0, 10.0, slots=3, max_in_flight=2)).events())
    # The third leaves when the first has arrived.
    sends = [spans[f"0SEND_F{m}"] for m in range(3)]
    assert sends == [(1, 12), (2, 13), (12, 23)]


def test_progress_is_told_while_a_long_walk_goes_on() -> None:
    shares: list[float] = []
    walk(build("gpipe", 64, 4096), timing(64), shares.append)
    assert len(shares) == 1
    assert 0 < shares[0] < 1


def test_events_are_each_ranks_compute_in_its_order_and_then_the_messages() -> None:
    schedule = schedule_of("0F0 0B0", "1F0 1B0")
    events = list(walk(schedule, timing(2)).events())
    assert [(event.rank, str(event.action)) for event in events] == [
        (0, "0F0"), (0, "0B0"), (1, "1F0"), (1, "1B0"), (0, "0SEND_F0"), (1, "1SEND_B0"),
    ]  # fmt: skip
    assert isinstance(events[0], Event)
