"""Notes of a step become the numbers and events that they stand for, however late they are read."""

from __future__ import annotations

from pipecomm.engine.record import Record
from pipecomm.schedule import Action
from tests.engine.finished_transfer import FinishedTransfer


def noted(*texts: str, keeps: bool = True) -> Record:
    record = Record(keeps=keeps)
    for place, text in enumerate(texts):
        record.add_compute(Action.parse(text), 2.0 * place, 2.0 * place + 1)
    return record


def test_events_are_in_the_order_of_their_beginning() -> None:
    record = noted("0F0", "0B0")
    record.add_transfer("recv", Action.parse("0B0"), FinishedTransfer(0.5, 1.9), (1.0, 2.0))
    stats = record.stats()
    assert [event.name for event in stats.events] == [
        *("0F0", "recv backward 0", "wait recv backward 0", "0B0")
    ]
    assert (stats.compute_s, stats.wait_s, stats.payload_nbytes_received) == (2.0, 1.0, 100)


def test_numbers_can_be_read_in_between_and_again() -> None:
    record = noted("0F0")
    assert record.stats().compute_s == record.stats().compute_s == 1.0
    record.add_compute(Action.parse("0B0"), 2.0, 5.0)
    assert record.stats().compute_s == 4.0


def test_what_is_counted_while_the_step_runs_is_passed_on() -> None:
    record = noted("0F0")
    record.step_s, record.weight_versions, record.updates_left_out = 3.0, 2, 1
    stats = record.stats()
    assert (stats.step_s, stats.weight_versions, stats.updates_left_out) == (3.0, 2, 1)


def test_activations_are_kept_until_the_end_of_their_backward() -> None:
    assert noted("0F0", "0F1", "0B0", "0F2", "0B1", "0B2").stats().peak_activations == 2
    assert noted("0F0", "1F0", "1I0", "0I0", "1W0", "0W0").stats().peak_activations == 2


def test_an_evaluation_keeps_none() -> None:
    assert noted("0F0", "0F1", keeps=False).stats().peak_activations == 0
