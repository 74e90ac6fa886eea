"""The result of a step works its numbers out once, and lets go of the transfers that had them."""

from __future__ import annotations

import gc
import pickle
import weakref

from pipecomm.engine.record import Record
from pipecomm.engine.result import StepResult
from pipecomm.schedule import Action


class Finished:
    started_s, done_s, payload_nbytes, wire_nbytes = 1.0, 2.0, 8, 9


def result() -> tuple[StepResult, weakref.ref[Finished]]:
    record = Record()
    record.add_compute(Action.parse("0F0"), 0.0, 1.0)
    transfer = Finished()
    record.add_transfer("send", Action.parse("0SEND_F0"), transfer, None)  # type: ignore[arg-type]
    return StepResult(0.5, None, record), weakref.ref(transfer)


def test_stats_are_worked_out_once_and_free_the_transfers() -> None:
    made, transfer = result()
    assert transfer() is not None
    assert made.stats is made.stats
    assert made.stats.payload_nbytes_sent == 8
    gc.collect()
    assert transfer() is None


def test_numbers_go_to_another_process() -> None:
    made, _ = result()
    other = pickle.loads(pickle.dumps(made))
    assert (other.loss, other.outputs, other.stats) == (0.5, None, made.stats)
    assert "loss=0.5" in repr(other)
