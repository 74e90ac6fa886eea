"""Actions: the traits of each kind, and the text form that prints and parses back."""

from __future__ import annotations

import copy
import pickle

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Direction, Kind
from pipecomm.schedule.action import KINDS, RECEIVES, SENDS


@pytest.mark.parametrize("kind", list(Kind))
def test_action_of_each_kind_prints_and_parses_back(kind: Kind) -> None:
    action = Action(kind, 12, 305)
    assert str(action) == f"12{kind.name}305"
    assert Action.parse(str(action)) == action


def test_action_with_spaces_around_parses() -> None:
    assert Action.parse(" 0F3 ") == Action(Kind.F, 0, 3)


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0f1", "-1F0", "0F0.5", "0F1 0F2", "0B1B", "\u0661F0", "0F" + "9" * 5000],
)
def test_action_text_without_stage_kind_microbatch_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an action as stage, kind, microbatch"):
        Action.parse(text)


@pytest.mark.parametrize("kind", ["UNSHARD", "X"])
def test_action_of_unknown_kind_names_the_known_ones(kind: str) -> None:
    known = "F, B, I, W, U, SEND_F, RECV_F, SEND_B, RECV_B"
    with pytest.raises(ConfigError, match=f"{known}; got '{kind}'"):
        Action.parse(f"0{kind}0")


def test_only_forward_backward_its_parts_and_update_are_compute() -> None:
    assert [kind.name for kind in Kind if kind.is_compute] == list("FBIWU")


def test_kinds_are_numbered_in_their_order() -> None:
    assert [KINDS[kind.index] for kind in Kind] == list(Kind) == list(KINDS)


def test_update_follows_a_backward_of_either_form_and_sends_nothing() -> None:
    assert Kind.U.after == (Kind.B, Kind.W)
    assert (Kind.U.direction, Kind.U.change_in_live) == (None, 0)


def test_each_kind_is_itself_when_copied_pickled_or_read_back() -> None:
    for kind in Kind:
        assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is Kind(kind.value) is kind


def test_a_split_backward_keeps_and_sends_together_what_a_whole_one_does() -> None:
    whole, parts = Kind.B, (Kind.I, Kind.W)
    assert whole.after == Kind.I.after == (Kind.F,)
    assert Kind.W.after == (Kind.I,)
    assert sum(part.change_in_live for part in parts) == whole.change_in_live
    assert Kind.F.change_in_live + whole.change_in_live == 0
    assert [part.direction for part in parts] == [whole.direction, None]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sends_and_receives_of_a_direction_go_its_way_and_compute_nothing(
    direction: Direction,
) -> None:
    send, receive = SENDS[direction], RECEIVES[direction]
    assert send.direction == receive.direction == direction
    assert (send.is_send, receive.is_send) == (True, False)
    for kind in (send, receive):
        assert (kind.is_compute, kind.after, kind.change_in_live) == (False, (), 0)
