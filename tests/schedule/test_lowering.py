"""Sends and receives put into the lists: complete, in channel order, one microbatch ahead."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Schedule, build, with_communication
from tests.schedule.examples import SMALL_SCHEDULES, schedule_of


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in with_communication(schedule)]


def of_kind(row: tuple[Action, ...], kind: Kind) -> list[int]:
    return [action.microbatch for action in row if action.kind is kind]


def test_1f1b_receives_are_posted_one_microbatch_ahead() -> None:
    assert texts(build("1f1b", 2, 3)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_gpipe_of_three_stages_has_both_directions_in_the_middle() -> None:
    assert texts(build("gpipe", 3, 2))[1] == (
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1"
    )


def test_single_stage_has_no_communication() -> None:
    schedule = build("1f1b", 1, 4)
    assert with_communication(schedule) == schedule.ranks


def test_forward_only_schedule_sends_no_gradients() -> None:
    assert texts(build("1f1b", 2, 2).forward_only()) == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1RECV_F1 1F0 1F1",
    ]


def test_neighbour_stages_on_one_rank_do_not_communicate() -> None:
    assert texts(schedule_of("0F0 1F0 1B0 0B0", "2F0 2B0")) == [
        "0F0 1RECV_B0 1F0 1SEND_F0 1B0 0B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    ]


def test_receives_of_two_stages_on_a_rank_are_ahead_independently() -> None:
    rows = texts(schedule_of("0F0 0F1 2F0 2F1", "1F0 1F1"))
    assert rows[0] == "0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2F1"


def test_receives_of_two_stages_from_one_rank_are_posted_in_one_order() -> None:
    # At most the next message of the rank and one more, whatever stages they are for.
    rows = texts(schedule_of("0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"))
    assert rows[1] == ("1RECV_F0 1RECV_F1 1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 3F0 3F1")


def test_input_part_of_a_backward_sends_and_the_weight_part_does_not() -> None:
    assert texts(schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0")) == [
        "0RECV_B0 0F0 0SEND_F0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_stages_in_a_v_hand_over_in_memory_at_the_turn() -> None:
    assert texts(schedule_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"))[1] == (
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0 1SEND_B0"
    )


def test_lists_with_a_stage_on_two_ranks_have_no_messages_to_find() -> None:
    with pytest.raises(ConfigError, match="stage 1 on one rank; got it on 0 and 1"):
        with_communication(schedule_of("0F0 1F0", "1F1"))


@pytest.mark.parametrize("schedule", SMALL_SCHEDULES[::7], ids=repr)
def test_sends_pair_with_receives_in_order_on_each_channel(schedule: Schedule) -> None:
    lowered = with_communication(schedule)
    for rank in range(schedule.num_stages - 1):
        upper, lower = lowered[rank], lowered[rank + 1]
        assert of_kind(upper, Kind.SEND_F) == of_kind(lower, Kind.RECV_F)
        assert of_kind(lower, Kind.SEND_B) == of_kind(upper, Kind.RECV_B)
        assert len(of_kind(upper, Kind.SEND_F)) == schedule.num_microbatches
        assert len(of_kind(lower, Kind.SEND_B)) == schedule.num_microbatches
    assert not of_kind(lowered[0], Kind.RECV_F) + of_kind(lowered[0], Kind.SEND_B)
    assert not of_kind(lowered[-1], Kind.SEND_F) + of_kind(lowered[-1], Kind.RECV_B)


@pytest.mark.parametrize("schedule", SMALL_SCHEDULES[::7], ids=repr)
def test_lowering_keeps_the_compute_order(schedule: Schedule) -> None:
    for row, lowered in zip(schedule.ranks, with_communication(schedule), strict=True):
        assert tuple(action for action in lowered if action.kind.is_compute) == row


@pytest.mark.parametrize("schedule", SMALL_SCHEDULES, ids=repr)
def test_open_receives_stay_at_two_and_the_next_is_open_before_compute(schedule: Schedule) -> None:
    for rank, row in enumerate(with_communication(schedule)):
        for compute, receive, has_peer in (
            (Kind.F, Kind.RECV_F, rank > 0),
            (Kind.B, Kind.RECV_B, rank < schedule.num_stages - 1),
        ):
            if has_peer:
                check_ahead(row, compute, receive, schedule.num_microbatches)


def check_ahead(row: tuple[Action, ...], compute: Kind, receive: Kind, num_messages: int) -> None:
    posted = used = 0
    for action in row:
        if action.kind is receive:
            posted += 1
            assert posted - used <= 2
        elif action.kind is compute:
            assert posted == min(used + 2, num_messages)
            used += 1
