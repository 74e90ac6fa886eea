"""What check refuses: lists that lie, and lists that cannot reach their end."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Kind, Schedule, build
from tests.schedule.examples import schedule_of


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
            r"compute only: F, B, I, W, U .*; got 0SEND_F0 at position 1",
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
