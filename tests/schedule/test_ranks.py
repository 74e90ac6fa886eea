"""Lists as numbers: equal to the objects they stand for, and small."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Ranks, Row, Schedule, build
from pipecomm.schedule.ranks import action_array, pack

ACTIONS = (Action(Kind.F, 0, 0), Action(Kind.W, 70_000, 3), Action(Kind.SEND_B, -1, 2**31 - 1))


def test_packed_actions_are_given_back_as_they_were() -> None:
    row = Row(pack(ACTIONS))
    assert tuple(row) == ACTIONS
    assert (row[0], row[-1], row[1:]) == (ACTIONS[0], ACTIONS[-1], ACTIONS[1:])
    assert len(row) == 3
    assert row.index(ACTIONS[2]) == 2
    with pytest.raises(IndexError):
        row[3]


def test_row_equals_any_sequence_of_the_same_actions() -> None:
    row = Row(pack(ACTIONS))
    assert row == ACTIONS
    assert row == ACTIONS
    assert row == Row(pack(list(ACTIONS)))
    assert row != ACTIONS[:2]
    assert row != Row(pack(ACTIONS[:2]))
    assert hash(row) == hash(Row(pack(ACTIONS)))
    assert Row(pack(())) == ()
    assert list(Row(pack(()))) == []


def test_ranks_are_rows_of_actions() -> None:
    ranks = Ranks.of([ACTIONS, (), ACTIONS[:1]])
    assert len(ranks) == 3
    assert ranks == (ACTIONS, (), ACTIONS[:1])
    assert ranks[2] == ACTIONS[:1]
    assert ranks[-1] == ranks[2]
    assert ranks[0:2] == (ACTIONS, ())
    assert ranks != Ranks.of([ACTIONS, ACTIONS[:1], ()])
    assert Ranks.of(ranks) is ranks
    assert pickle.loads(pickle.dumps(ranks)) == ranks
    assert repr(ranks) == "Ranks(3 ranks, 4 actions)"
    assert repr(ranks[0]) == f"Row({' '.join(map(str, ACTIONS))})"


def test_place_of_an_action_counts_through_empty_rows() -> None:
    ranks = Ranks.of([ACTIONS[:2], (), ACTIONS])
    assert [ranks.place_of(index) for index in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_columns_are_those_of_all_actions() -> None:
    ranks = Ranks.of([ACTIONS[:1], ACTIONS[1:]])
    assert ranks.column("stage").tolist() == [0, 70_000, -1]
    assert ranks.column("microbatch").tolist() == [0, 3, 2**31 - 1]
    assert ranks.column("kind").tolist() == [action.kind.index for action in ACTIONS]


def test_ranks_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        build("gpipe", 1, 1).ranks.actions[0, 0] = 1


def test_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"below 2\^31; got 2147483648"):
        pack([Action(Kind.F, 0, 2**31)])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((2, 3), np.int64), r"int32 of shape \(actions, 3\); got int64 of \(2, 3\)"),
        (np.zeros((2, 2), np.int32), r"got int32 of \(2, 2\)"),
        (np.array([[0, 0, 0], [99, 0, 0]], np.int32), "kinds 0 to 8; got 0 to 99"),
        (np.array([[-1, 0, 0]], np.int32), "kinds 0 to 8; got -1 to -1"),
    ],
)
def test_array_that_holds_no_actions_is_refused(array: np.ndarray, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Schedule("mine", 1, 1, [array])  # type: ignore[arg-type]


def test_action_array_has_an_action_for_each_microbatch_in_order() -> None:
    assert Row(action_array(Kind.I, 2, [5, 3])) == (Action(Kind.I, 2, 5), Action(Kind.I, 2, 3))


def test_action_takes_twelve_bytes() -> None:
    ranks = build("1f1b", 256, 1024).ranks
    assert ranks.actions.nbytes == 12 * 2 * 256 * 1024
    assert ranks.actions.dtype == np.int32
