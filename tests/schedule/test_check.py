"""What check refuses: lists that lie, and lists that cannot reach their end; against an oracle."""

from __future__ import annotations

import graphlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Schedule, build, with_communication
from tests.schedule.examples import schedule_of


def is_refused(schedule: Schedule, *, sends_block: bool = False) -> bool:
    try:
        schedule.check(sends_block=sends_block)
    except ConfigError:
        return True
    return False


def test_backward_before_its_forward_is_refused_and_marked() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1").check()
    assert str(caught.value) == (
        "expected 0F1 before 0B1; got 0B1 at position 1 of rank 0\n"
        "  rank 0: 0F0 [0B1] 0F1 0B0   <-- here\n"
        "  rank 1: 1F0 1B0 1F1 1B1"
    )


def test_deadlock_says_who_waits_for_whom_and_marks_each_place() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").check()
    assert str(caught.value) == (
        "expected every rank to reach the end of its list; got a deadlock with 0 slots: "
        "2 of 2 ranks wait\n"
        "  rank 0 at 0B0, whose input rank 1 has not sent\n"
        "  rank 1 at 1F1, whose input rank 0 has not sent\n"
        "  rank 0: 0RECV_B0 0F0 0SEND_F0 0RECV_B1 [0B0] 0F1 0SEND_F1 0B1   <-- here\n"
        "  rank 1: 1RECV_F0 1RECV_F1 1F0 [1F1] 1B0 1SEND_B0 1B1 1SEND_B1   <-- here\n"
        "reorder the marked actions so that what each one waits for comes before it"
    )


def test_only_the_ranks_that_wait_are_marked() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of("0F0 0F1 0B1 0B0", "2F0 2F1 2B1 2B0 1F0 1F1 1B1 1B0").check()
    assert "rank 1 at 2F0, whose input its own rank makes later" in str(caught.value)
    rows = [line for line in str(caught.value).splitlines() if line.startswith("  rank 0: ")]
    assert rows[0].endswith("<-- here"), "rank 0 waits for a gradient that never comes"


def test_messages_used_in_another_order_than_sent_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1").check()
    assert str(caught.value).startswith(
        "expected microbatch 0, as stage 0 (rank 0) sends it as message 0 to stage 1; "
        "got 1F1 at position 0 of rank 1\n"
    )


def test_gradients_used_in_another_order_than_sent_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"microbatch 1, as stage 1 \(rank 1\) sends it"):
        schedule_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0").check()


def test_two_stages_between_the_same_ranks_share_the_order_of_their_messages() -> None:
    # Stages 0 and 2 are on rank 0, stages 1 and 3, which take what they make, on rank 1.
    with pytest.raises(ConfigError) as caught:
        schedule_of("0F0 0F1 2F0 2F1", "1F0 3F0 1F1 3F1").check()
    assert str(caught.value).startswith(
        "expected microbatch 1, as stage 0 (rank 0) sends it as message 1 to stage 1; "
        "got 3F0 at position 1 of rank 1\n"
    )
    schedule_of("0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1").check()


def test_gradients_of_two_stages_share_the_order_of_their_messages() -> None:
    forwards = ("0F0 2F0", "1F0 3F0")
    schedule_of(f"{forwards[0]} 2B0 0B0", f"{forwards[1]} 3B0 1B0").check()
    two = ("0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1")
    with pytest.raises(ConfigError, match=r"stage 3 \(rank 1\) sends it as message 1 to stage 2"):
        schedule_of(f"{two[0]} 2B0 0B0 2B1 0B1", f"{two[1]} 3B0 3B1 1B0 1B1").check()


def test_stages_placed_in_a_v_keep_an_order_for_each_pair_of_stages() -> None:
    schedule_of("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1").check()


def test_split_backward_sends_its_gradient_before_its_weights_are_done() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1")
    schedule.check()
    schedule.check(sends_block=True)
    assert schedule.peak_activations() == (2, 2)


def test_order_is_free_where_no_message_is_sent() -> None:
    schedule_of("0F1 0F0 0B0 0B1").check()
    schedule_of("0F0 0F1 1F1 1F0 1B0 1B1 0B1 0B0").check()


def test_backwards_may_run_in_reverse_order() -> None:
    schedule_of("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0").check()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            ("0F0 0SEND_F0", "1F0"),
            r"compute only: F, B, I, W .*; got 0SEND_F0 at position 1",
        ),
        (("0F0 1F0", "1B0 0B0"), "stage 1 on one rank, and rank 0 has it; got 1B0"),
        (("0F0 0F0",), "each action once; got 0F0 at position 1 of rank 0"),
        (("0F0 0B0 0B0",), "each action once; got 0B0 at position 2"),
        (("0F0 0W0 0I0",), "0I0 before 0W0; got 0W0 at position 1"),
        (("0I0 0W0 0F0",), "0F0 before 0I0; got 0I0 at position 0"),
        (("0F0 0I0 0B0",), "no 0B0 after 0I0; got 0B0 at position 2"),
        (("0F0 0B0 0I0",), "no 0I0 after 0B0; got 0I0 at position 2"),
        (("0F0 0B0 0W0",), "0I0 before 0W0; got 0W0 at position 2"),
        (("0F0 0I0",), "got 1 missing: 0W0"),
        (("0F0 0F1 0I0 0W0",), "got 1 missing: 0B1"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0"), "got 1 missing: 1B1"),
        (("0F0 0B0", "2F0 2B0"), "got 2 missing: 1F0 1B0"),
        (("0F0 0B0", ""), "actions on every rank; got none on rank 1"),
        (("0F999999999",), r"got 999999999 missing: 0F0 .* \.\.\."),
        (("999999999F0",), r"got 999999999 missing: 0F0 1F0 .* \.\.\."),
    ],
)
def test_list_that_is_not_a_whole_schedule_is_refused(rows: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        schedule_of(*rows).check()


@pytest.mark.parametrize("stage", [-1, 2])
@pytest.mark.parametrize("microbatch", [-1, 2])
def test_indices_outside_the_schedule_are_refused(stage: int, microbatch: int) -> None:
    row = (Action(Kind.F, stage, 0),)
    with pytest.raises(ConfigError, match=f"stages 0 to 1; got {stage}F0"):
        Schedule("mine", 2, 2, (row,)).check()
    row = (Action(Kind.F, 0, microbatch),)
    with pytest.raises(ConfigError, match=f"microbatches 0 to 1; got 0F{microbatch}"):
        Schedule("mine", 2, 2, (row,)).check()


def test_error_about_many_ranks_and_long_lists_stays_readable() -> None:
    schedule = build("gpipe", 200, 50)
    ranks = [list(row) for row in schedule.ranks]
    ranks[100][25], ranks[100][75] = ranks[100][75], ranks[100][25]
    with pytest.raises(ConfigError) as caught:
        Schedule("mine", 200, 50, tuple(map(tuple, ranks))).check()
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["  rank 99", "  rank 100", "  rank 101"]
    assert lines[2].startswith("  rank 100: ... 100F19 ")
    assert " 100F24 [100B25] 100F26 " in lines[2]
    assert lines[2].endswith(" 100F31 ...   <-- here")
    assert max(map(len, lines)) < 200


def test_order_that_needs_free_sends_is_refused_only_when_sends_block() -> None:
    # A ring: each rank's first sends wait for a rank that is still sending.
    rows = [
        " ".join(f"{stage}F{m}" for stage in (rank, rank + 2) for m in range(6))
        for rank in range(2)
    ]
    schedule_of(*rows).check()
    with pytest.raises(
        ConfigError, match="0 slots and blocking sends: 2 of 2 ranks wait"
    ) as caught:
        schedule_of(*rows).check(sends_block=True)
    assert "whose receive rank 1 has not posted" in str(caught.value)


def has_no_deadlock(schedule: Schedule, *, sends_block: bool) -> bool:
    """The oracle: is the graph of 'must come before' over the lowered lists free of cycles?"""
    lowered = with_communication(schedule)
    place = {action: (r, i) for r, row in enumerate(lowered) for i, action in enumerate(row)}
    graph: dict[tuple[int, int], set[tuple[int, int]]] = {node: set() for node in place.values()}
    for action, (rank, index) in place.items():
        if index:
            graph[rank, index].add((rank, index - 1))
        name, _, direction = action.kind.value.partition("_")
        step = 1 if (direction or name) == "F" else -1
        if name == "SEND" and sends_block and index + 1 < len(lowered[rank]):
            post = Action(Kind[f"RECV_{direction}"], action.stage + step, action.microbatch)
            graph[rank, index + 1].add(place[post])
        made_by = place.get(Action(action.kind, action.stage - step, action.microbatch))
        if action.kind.is_compute and made_by is not None:
            graph[rank, index].add(made_by)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def keeps_message_order(schedule: Schedule) -> bool:
    """Whether each rank uses what another sends it, by direction, in the order of sending."""
    rank_of = {action.stage: rank for rank, row in enumerate(schedule.ranks) for action in row}
    sent: dict[tuple[bool, int, int], list[tuple[int, int]]] = {}
    used: dict[tuple[bool, int, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            is_forward = action.kind is Kind.F
            step = 1 if is_forward else -1
            # A message is named by the stage that sends it, and its microbatch.
            for there, pairs, source in ((1, sent, 0), (-1, used, -step)):
                peer = rank_of.get(action.stage + there * step, rank)
                pair = (rank, peer) if there == 1 else (peer, rank)
                if peer != rank:
                    message = (action.stage + source, action.microbatch)
                    pairs.setdefault((is_forward, *pair), []).append(message)
    return sent == used


def keeps_forward_first(schedule: Schedule) -> bool:
    return all(
        row.index(Action(Kind.F, action.stage, action.microbatch)) <= row.index(action)
        for row in schedule.ranks
        for action in row
    )


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


@settings(max_examples=300, deadline=None)
@given(shuffled_schedules(), st.booleans())
def test_check_refuses_exactly_the_orders_the_graph_refuses(
    schedule: Schedule, sends_block: bool
) -> None:
    is_possible = (
        keeps_forward_first(schedule)
        and keeps_message_order(schedule)
        and has_no_deadlock(schedule, sends_block=sends_block)
    )
    assert is_refused(schedule, sends_block=sends_block) != is_possible


@st.composite
def built_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]))
    return build(name, draw(st.integers(2, 6)), draw(st.integers(1, 8)))


def change(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(row)
    return Schedule("mutated", schedule.num_stages, schedule.num_microbatches, tuple(ranks))


@settings(max_examples=100, deadline=None)
@given(built_schedules(), st.data())
def test_schedule_with_an_action_dropped_is_refused(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_stages - 1))
    row = list(schedule.ranks[rank])
    del row[data.draw(st.integers(0, len(row) - 1))]
    assert is_refused(change(schedule, rank, row))


@settings(max_examples=100, deadline=None)
@given(built_schedules(), st.data())
def test_schedule_with_an_action_twice_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank, source = (data.draw(st.integers(0, schedule.num_stages - 1)) for _ in range(2))
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


def test_forward_only_schedule_keeps_no_activations() -> None:
    assert build("gpipe", 3, 5).forward_only().peak_activations() == (0, 0, 0)


def test_peak_activations_of_several_stages_on_a_rank_are_counted_per_stage() -> None:
    schedule = schedule_of("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert schedule.peak_activations() == (2, 2, 1)


def test_activations_of_a_split_backward_are_kept_until_its_weights_are_done() -> None:
    assert schedule_of("0F0 0I0 0F1 0W0 0I1 0W1").peak_activations() == (2,)
    assert schedule_of("0F0 0I0 0W0 0F1 0I1 0W1").peak_activations() == (1,)
