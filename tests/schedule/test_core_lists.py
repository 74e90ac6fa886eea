"""What the core is told of kinds and neighbours is what their traits and the placement say."""

from __future__ import annotations

import pytest

from pipecomm import _native
from pipecomm.errors import NotBuiltError
from pipecomm.schedule import Kind, Placement, build
from pipecomm.schedule.action import KINDS
from pipecomm.schedule.core_lists import (
    _KIND_TABLE,
    _MESSAGE_TABLE,
    COMPUTE_KINDS,
    DIRECTIONS,
    _way_table,
    core_lists,
)


def test_kinds_that_make_the_same_gradient_are_rivals_and_no_others_are() -> None:
    rivals = {
        kind.name: {other.name for other in KINDS if row[3] >> other.index & 1}
        for kind, row in zip(KINDS, _KIND_TABLE.tolist(), strict=True)
        if row[3]
    }
    assert rivals == {"B": {"I"}, "I": {"B"}}


def test_kind_table_has_role_direction_and_predecessors() -> None:
    table = {kind.name: row[:3] for kind, row in zip(KINDS, _KIND_TABLE.tolist(), strict=True)}
    assert table["F"] == [0, 0, 0]
    assert table["I"] == [0, 1, 1 << Kind.F.index]
    assert table["U"] == [0, -1, 1 << Kind.B.index | 1 << Kind.W.index]
    assert table["SEND_B"] == [1, 1, 0]
    assert table["RECV_F"] == [2, 0, 0]
    assert [KINDS[row[0]].name for row in _MESSAGE_TABLE.tolist()] == ["SEND_F", "SEND_B"]
    assert [KINDS[row[1]].name for row in _MESSAGE_TABLE.tolist()] == ["RECV_F", "RECV_B"]


def test_way_table_has_the_hops_of_the_placement() -> None:
    placement = Placement.v_shaped(4, 2)
    table = _way_table(placement)
    assert table[0].tolist() == [0, 1, 1, 0]
    for stage in range(4):
        for number, direction in enumerate(DIRECTIONS):
            taken, given = placement.hop_to(stage, direction), placement.hop_from(stage, direction)
            assert table[1 + number, stage] == (-1 if taken is None else taken.source)
            assert table[3 + number, stage] == (-1 if given is None else given.target)


def test_lists_without_a_placement_can_be_searched_for_faults() -> None:
    schedule = build("1f1b", 2, 2)
    assert core_lists(schedule.ranks, None).find_fault(2, 2) is None
    assert core_lists(schedule.ranks, None).find_fault(1, 2) == (1, 4, 0)
    assert len(COMPUTE_KINDS) == 5


def test_schedules_are_built_without_the_core_and_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = _native._MissingCore("not built: run make install")
    monkeypatch.setattr("pipecomm.schedule.core_lists.core", missing)
    schedule = build("zb-v", 4, 3)
    assert schedule.peak_activations() == (3, 3, 2, 1)
    assert schedule.to_csv().startswith("0F0,0F1,0F2,3F0")
    with pytest.raises(NotBuiltError, match="run make install"):
        schedule.check()
