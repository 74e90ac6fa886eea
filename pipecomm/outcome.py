"""What a rank tells the launcher that started it, above all whose fault its end is."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pipecomm import settings
from pipecomm.errors import LinkTimeoutError, StageFailedError, TransportError

__all__ = [
    "ENDED_BY_ANOTHER",
    "Event",
    "event_pipe",
    "report_end",
    "report_uncaught",
]

#: A JSON object; its "event" says what kind.
Event = dict[str, Any]
#: The event of a rank that ends by what another rank did, or does not do.
ENDED_BY_ANOTHER = "ended by another"

# Gloo has one class for all errors; these it raises where a peer's connection has ended.
_LOST_IN_GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def event_pipe() -> Callable[[Event], None] | None:
    """The way to the launcher's on_event; None without a launcher."""
    if settings.EVENT_FD.text() is None:
        return None
    descriptor = settings.EVENT_FD.value()

    def send(event: Event) -> None:
        line = memoryview((json.dumps(event) + "\n").encode())
        while line:
            line = line[os.write(descriptor, line) :]

    return send


def report_end(error: BaseException) -> None:
    """Tell the launcher, if there is one, where `error`, which ends this rank, says that another
    rank is the cause: the job's outcome then names that one, not this one.
    """
    send = event_pipe()
    # A grandchild has inherited the variable, not the rank.
    if send is None or settings.LAUNCHER_PID.value() != os.getppid():
        return
    if _is_by_another(_root(error)):
        send({"event": ENDED_BY_ANOTHER})


@functools.cache
def report_uncaught() -> None:
    """From now on report_end() is told of an exception that ends this process."""
    if settings.EVENT_FD.text() is None:
        return
    show = sys.excepthook

    def report_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        report_end(error)
        show(kind, error, trace)

    sys.excepthook = report_and_show


def _root(error: BaseException) -> BaseException:
    """The first of a chain of exceptions: what follows it is how the program took it."""
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            return error
        error = before


def _is_by_another(error: BaseException) -> bool:
    if isinstance(error, (TransportError, StageFailedError, LinkTimeoutError)):
        return True
    is_torchs = type(error).__name__ in ("RuntimeError", "DistBackendError", "DistNetworkError")
    return is_torchs and any(text in str(error) for text in _LOST_IN_GLOO)
