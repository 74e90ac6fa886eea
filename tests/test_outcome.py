"""A rank tells its launcher whether its end is the fault of another one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipecomm import outcome
from pipecomm.errors import LinkTimeoutError, PeerLostError, StageFailedError
from pipecomm.outcome import event_pipe, report_end, report_uncaught


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Gives what has been reported to a launcher, which is this process's parent."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv("PIPECOMM_EVENT_FD", str(writer))
    monkeypatch.setenv("PIPECOMM_LAUNCHER_PID", str(os.getppid()))

    def read() -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
        except BlockingIOError:
            return []

    yield read
    os.close(reader)
    os.close(writer)


Told = Callable[[], list[dict[str, Any]]]


@pytest.mark.parametrize(
    "error",
    [
        StageFailedError("stage 1"),
        PeerLostError("rank 1"),
        LinkTimeoutError("10 s"),
        RuntimeError("[...] Connection closed by peer [127.0.0.1]:1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_end_by_another_rank_is_reported(error: Exception, told: Told) -> None:
    report_end(error)
    assert told() == [{"event": "ended by another"}]


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_end_by_itself_is_not_reported(error: BaseException, told: Told) -> None:
    report_end(error)
    assert told() == []


def test_first_of_a_chain_counts(told: Told) -> None:
    own = ValueError("first")
    own_then_lost = PeerLostError("then")
    own_then_lost.__cause__ = own
    report_end(own_then_lost)
    assert told() == []
    lost_then_own = ValueError("then")
    lost_then_own.__context__ = PeerLostError("first")
    report_end(lost_then_own)
    assert told() == [{"event": "ended by another"}]


def test_child_of_a_rank_does_not_speak_for_it(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_LAUNCHER_PID", str(os.getpid()))
    report_end(PeerLostError("rank 1"))
    assert told() == []


def test_without_a_launcher_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECOMM_EVENT_FD", raising=False)
    monkeypatch.setattr(sys, "excepthook", before := sys.excepthook)
    report_uncaught.cache_clear()
    report_uncaught()
    report_end(PeerLostError("rank 1"))
    assert event_pipe() is None
    assert sys.excepthook is before


def test_uncaught_error_is_reported_and_shown(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    outcome.report_uncaught.cache_clear()
    report_uncaught()
    report_uncaught()  # once is enough
    error = PeerLostError("rank 1")
    sys.excepthook(PeerLostError, error, None)
    assert told() == [{"event": "ended by another"}]
    assert shown == [error]
    outcome.report_uncaught.cache_clear()
