"""Sums and events from what a step did."""

from __future__ import annotations

import pytest

from pipecomm.engine.stats import StepStats
from pipecomm.schedule import Action, Kind
from tests.engine.finished_transfer import FinishedTransfer


def test_bytes_are_counted_by_direction() -> None:
    stats = StepStats()
    stats.add_transfer("send", Action(Kind.SEND_F, 0, 0), FinishedTransfer(1, 2), None)
    stats.add_transfer("recv", Action(Kind.B, 0, 0), FinishedTransfer(1, 2, 7, 3), None)
    assert (stats.payload_nbytes_sent, stats.wire_nbytes_sent) == (100, 40)
    assert (stats.payload_nbytes_received, stats.wire_nbytes_received) == (7, 3)
    assert stats.wait_s == stats.exposed_comm_s == 0
    assert [event.name for event in stats.events] == ["send forward 0", "recv backward 0"]


@pytest.mark.parametrize(
    ("waited", "exposed_s"),
    [
        ((0.0, 4.0), 2.0),  # waited before it started: only the transfer itself counts
        ((2.5, 4.0), 1.5),  # it was half way when the wait began
        ((5.0, 5.5), 0.0),  # it was over
    ],
)
def test_exposed_communication_is_the_wait_while_the_message_was_on_its_way(
    waited: tuple[float, float], exposed_s: float
) -> None:
    stats = StepStats()
    stats.add_transfer("recv", Action(Kind.F, 1, 3), FinishedTransfer(2, 4), waited)
    assert stats.wait_s == waited[1] - waited[0]
    assert stats.exposed_comm_s == exposed_s
    wait = stats.events[-1]
    assert (wait.name, wait.lane, wait.start_s) == ("wait recv forward 3", "wait", waited[0])
    assert wait.args["stage"] == 1
    assert wait.args["microbatch"] == 3


def test_bubble_is_the_share_without_compute() -> None:
    stats = StepStats(step_s=10)
    stats.add_compute(Action(Kind.F, 0, 0), 1, 3)
    stats.add_compute(Action(Kind.B, 0, 0), 4, 9)
    assert stats.compute_s == 7
    assert stats.bubble == pytest.approx(0.3)


def test_bubble_of_a_step_that_took_no_time_is_none() -> None:
    assert StepStats().bubble == 0
