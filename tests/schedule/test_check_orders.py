"""Orders that check accepts and refuses, over many schedules and each kind of damage to one."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Placement, Schedule, build
from tests.schedule.oracle import is_possible


def is_refused(schedule: Schedule, *, sends_block: bool = False) -> bool:
    try:
        schedule.check(sends_block=sends_block)
    except ConfigError:
        return True
    return False


@st.composite
def shuffled_schedules(draw: st.DrawFn) -> Schedule:
    """Complete lists, several stages on a rank at times, in an order that is often possible."""
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_ranks = draw(st.integers(1, num_stages))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for row in build(draw(st.sampled_from(["gpipe", "1f1b"])), num_stages, num_microbatches).ranks:
        for position, action in enumerate(row):
            target = rows[action.stage % num_ranks]
            target.insert(min(len(target), 2 * position), action)
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        i, j = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        row[i], row[j] = row[j], row[i]
    return Schedule("shuffled", num_stages, num_microbatches, tuple(map(tuple, rows)))


@st.composite
def placed_schedules(draw: st.DrawFn) -> Schedule:
    """Valid ones, of stages placed in a line, a loop or a V, with backwards split or not."""
    num_ranks, num_microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    make, rounds = draw(
        st.sampled_from(
            [(Placement.linear, 1), (Placement.looped, 2), (Placement.looped, 3),
             (Placement.v_shaped, 2)]
        )
    )  # fmt: skip
    placement = make(rounds * num_ranks, num_ranks)
    stages = range(placement.num_stages)
    down = [[Action(Kind.F, stage, m) for stage in stages] for m in range(num_microbatches)]
    up = [
        [
            Action(kind, stage, m)
            for stage in reversed(stages)
            for kind in draw(st.sampled_from([(Kind.B,), (Kind.I, Kind.W)]))
        ]
        for m in range(num_microbatches)
    ]
    if draw(st.booleans()):
        parts = [*down, *up]
    else:
        parts = [part for pair in zip(down, up, strict=True) for part in pair]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for part in parts:
        for action in part:
            rows[placement.rank_of[action.stage]].append(action)
    return Schedule("placed", placement.num_stages, num_microbatches, tuple(map(tuple, rows)))


@settings(max_examples=300, deadline=None)
@given(shuffled_schedules(), st.booleans())
def test_check_refuses_exactly_the_orders_the_graph_refuses(
    schedule: Schedule, sends_block: bool
) -> None:
    assert is_refused(schedule, sends_block=sends_block) != is_possible(
        schedule, sends_block=sends_block
    )


@settings(max_examples=100, deadline=None)
@given(placed_schedules())
def test_one_microbatch_after_the_other_is_possible_however_stages_are_placed(
    schedule: Schedule,
) -> None:
    schedule.check()
    assert is_possible(schedule)


@settings(max_examples=300, deadline=None)
@given(placed_schedules(), st.data(), st.booleans())
def test_action_moved_is_refused_exactly_where_the_graph_refuses_it(
    schedule: Schedule, data: st.DataObject, sends_block: bool
) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    row = list(schedule.ranks[rank])
    places = st.integers(0, len(row) - 1)
    row.insert(data.draw(places), row.pop(data.draw(places)))
    moved = change(schedule, rank, row)
    assert is_refused(moved, sends_block=sends_block) != is_possible(moved, sends_block=sends_block)


@settings(max_examples=100, deadline=None)
@given(placed_schedules(), st.data())
def test_action_moved_to_another_rank_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    source, target = (data.draw(st.integers(0, len(schedule.ranks) - 1)) for _ in range(2))
    rows = [list(row) for row in schedule.ranks]
    action = rows[source].pop(data.draw(st.integers(0, len(rows[source]) - 1)))
    rows[target].append(action)
    moved = Schedule("moved", schedule.num_stages, schedule.num_microbatches, tuple(rows))
    assert source == target or is_refused(moved)


@st.composite
def built_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]))
    return build(name, draw(st.integers(2, 6)), draw(st.integers(1, 8)))


def change(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(row)
    return Schedule("mutated", schedule.num_stages, schedule.num_microbatches, tuple(ranks))


@settings(max_examples=100, deadline=None)
@given(st.one_of(built_schedules(), placed_schedules()), st.data())
def test_schedule_with_an_action_dropped_is_refused(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    row = list(schedule.ranks[rank])
    del row[data.draw(st.integers(0, len(row) - 1))]
    dropped = change(schedule, rank, row)
    # Without its only backward a schedule evaluates.
    assume(dropped.has_backward)
    assert is_refused(dropped)


@settings(max_examples=100, deadline=None)
@given(st.one_of(built_schedules(), placed_schedules()), st.data())
def test_schedule_with_an_action_twice_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank, source = (data.draw(st.integers(0, len(schedule.ranks) - 1)) for _ in range(2))
    action = data.draw(st.sampled_from(schedule.ranks[source]))
    row = list(schedule.ranks[rank])
    row.insert(data.draw(st.integers(0, len(row))), action)
    assert is_refused(change(schedule, rank, row))


@settings(max_examples=100, deadline=None)
@given(built_schedules(), st.data())
def test_schedule_with_actions_of_a_kind_or_a_microbatch_swapped_is_refused(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    row = list(schedule.ranks[rank])
    i = data.draw(st.integers(0, len(row) - 1))
    partners = [
        j
        for j, action in enumerate(row)
        if j != i and (action.kind is row[i].kind or action.microbatch == row[i].microbatch)
    ]
    j = data.draw(st.sampled_from(partners))
    row[i], row[j] = row[j], row[i]
    assert is_refused(change(schedule, rank, row))
