"""What the core is told of kinds and neighbours is what their traits and the placement say."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from pipecomm import _native
from pipecomm._native import core
from pipecomm.errors import ConfigError, NotBuiltError
from pipecomm.schedule import Costs, Kind, Placement, build
from pipecomm.schedule.action import KINDS
from pipecomm.schedule.core_lists import (
    _KIND_TABLE,
    _MESSAGE_TABLE,
    COMPUTE_KINDS,
    DIRECTIONS,
    _way_table,
    core_lists,
)
from pipecomm.schedule.costs import timing_of
from pipecomm.schedule.ranks import Ranks


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


def arrays(**changed: Any) -> dict[str, Any]:
    """What the core is given for 1F1B on two ranks, with others in place of some."""
    schedule = build("1f1b", 2, 2)
    given: dict[str, Any] = {
        "actions": schedule.ranks.actions, "offsets": schedule.ranks.offsets, "kinds": _KIND_TABLE,
        "messages": _MESSAGE_TABLE, "ways": _way_table(schedule.placement),
    }  # fmt: skip
    return given | changed


def edited(name: str, place: Any, value: int) -> dict[str, Any]:
    array = arrays()[name].copy()
    array[place] = value
    return arrays(**{name: array})


def walk(lists: Any, **changed: Any) -> dict[str, Any]:
    values = timing_of(Costs(), 2)._asdict() | changed
    found: dict[str, Any] = lists.walk(**values, progress=None)
    return found


def test_arrays_as_they_should_be_are_walked() -> None:
    lists = core.ScheduleLists(**arrays())
    assert walk(lists)["clock_s"].tolist() == [6, 5]
    assert lists.find_misorder() is None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("actions", np.zeros(12, np.int32)),
        ("actions", np.zeros((4, 2), np.int32)),
        ("offsets", np.zeros((1, 3), np.int64)),
        ("kinds", np.zeros((9, 3), np.int32)),
        ("messages", np.zeros((2, 1), np.int32)),
        ("messages", np.zeros((0, 2), np.int32)),
        ("ways", np.zeros((4, 2), np.int32)),
        ("ways", np.zeros((5,), np.int32)),
    ],
)
def test_array_of_another_shape_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"expected {name} of shape"):
        core.ScheduleLists(**arrays(**{name: wrong}))


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.complex128, np.uint32])
def test_array_of_numbers_that_may_not_fit_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        core.ScheduleLists(**arrays(actions=arrays()["actions"].astype(dtype)))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("offsets", 0, 1),
        ("offsets", 0, -5),
        ("offsets", 1, 99),
        ("offsets", 1, -(2**62)),
        ("offsets", 2, 2**62),
        ("kinds", (0, 0), 3),
        ("kinds", (0, 1), 2),
        ("kinds", (0, 1), -2),
        ("actions", (0, 0), 9),
        ("actions", (0, 0), -1),
        ("actions", (0, 0), 2**31 - 1),
    ],
)
def test_rows_that_lead_outside_are_refused_by_every_call(
    name: str, place: Any, value: int
) -> None:
    lists = core.ScheduleLists(**edited(name, place, value))
    calls = (lambda: lists.find_fault(2, 2), lists.find_misorder, lists.lower, lambda: walk(lists))
    for call in calls:
        with pytest.raises(ConfigError, match="expected"):
            call()


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("actions", (0, 1), 2),
        ("actions", (0, 1), -1),
        ("actions", (0, 2), -1),
        ("actions", (0, 0), Kind.SEND_F.index),
        ("messages", (0, 0), 9),
        ("messages", (0, 1), -1),
        ("messages", (0, 1), Kind.F.index),
        ("messages", (1, 0), Kind.SEND_F.index),
        ("ways", (0, 0), 2),
        ("ways", (0, 1), -1),
        ("ways", (1, 1), 2),
        ("ways", (3, 0), 2**31 - 1),
        ("ways", (4, 1), -2),
    ],
)
def test_ways_that_lead_outside_are_refused(name: str, place: Any, value: int) -> None:
    lists = core.ScheduleLists(**edited(name, place, value))
    for call in (lists.find_misorder, lists.lower, lambda: walk(lists)):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_lists_without_offsets_or_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="offsets from 0 to the number of actions, 8"):
        core.ScheduleLists(**arrays(offsets=np.zeros(0, np.int64))).lower()
    with pytest.raises(ConfigError, match="expected"):
        core.ScheduleLists(**arrays(ways=np.zeros((5, 0), np.int32))).lower()
    with pytest.raises(ConfigError, match="numbers of stages and microbatches of 0 or more"):
        core.ScheduleLists(**arrays()).find_fault(-1, 2)


def test_message_that_nobody_sends_is_refused_in_a_search_for_misorder() -> None:
    ranks = Ranks.of([[], arrays()["actions"][4:]])
    lists = core.ScheduleLists(**arrays(actions=ranks.actions, offsets=ranks.offsets))
    with pytest.raises(ConfigError, match="stage 1 without what it takes for microbatch 0"):
        lists.find_misorder()


@pytest.mark.parametrize(
    "changed",
    [
        {"compute_s": np.zeros((9, 1))},
        {"compute_s": np.zeros((8, 2))},
        {"transfer_s": np.zeros((1, 2))},
        {"latency_s": np.zeros(4)},
        {"latency_s": np.full((2, 2), np.nan)},
        {"transfer_s": np.full((2, 2), np.inf)},
        {"compute_s": np.full((9, 2), -1.0)},
        {"slots": -1},
        {"max_in_flight": -1},
    ],
)
def test_timing_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        walk(core.ScheduleLists(**arrays()), **changed)


def test_any_number_of_slots_takes_no_memory() -> None:
    walked = walk(core.ScheduleLists(**arrays()), slots=2**63 - 1, max_in_flight=2**63 - 1)
    assert walked["clock_s"].tolist() == walk(core.ScheduleLists(**arrays()))["clock_s"].tolist()


def test_interrupt_ends_a_walk_before_its_end() -> None:
    schedule = build("1f1b", 2, 200_000)
    lists, timing = core_lists(schedule.ranks, schedule.placement), timing_of(Costs(), 2)
    begins = threading.Event()

    def interrupt() -> None:
        begins.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    done: list[Any] = []

    def walk_five_times() -> None:
        begins.set()
        # No line of Python runs between the walks, so only they can see the signal.
        done.extend(map(lists.walk, *zip(*[(*timing, None)] * 5, strict=True)))

    with pytest.raises(KeyboardInterrupt):
        walk_five_times()
    sender.join()
    assert len(done) < 5
