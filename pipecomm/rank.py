"""A rank's side of a job: which rank it is, its tie to the launcher, where its output goes."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from pipecomm.errors import ConfigError, LinkTimeoutError, StageFailedError, TransportError

__all__ = [
    "ENDED_BY_ANOTHER",
    "EVENT_FD",
    "EXIT_OTHER_RANK",
    "LAUNCHER_PID",
    "Event",
    "Place",
    "claim_stdout",
    "die_with_launcher",
    "event_pipe",
    "place_from_environment",
    "report_end",
    "report_uncaught",
]

#: Exit code of a rank that ends because another one failed or was lost.
EXIT_OTHER_RANK = 3
#: Variables by which the launcher tells a rank whose child it is and where to report.
LAUNCHER_PID = "PIPECOMM_LAUNCHER_PID"
EVENT_FD = "PIPECOMM_EVENT_FD"

#: A JSON object; its "event" says what kind.
Event = dict[str, Any]
#: The event of a rank that ends by what another rank did, or does not do.
ENDED_BY_ANOTHER = "ended by another"

# Gloo has one class for all errors; these it raises where a peer's connection has ended.
_LOST_IN_GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

_PR_SET_PDEATHSIG = 1
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process is `rank` of `size`."""

    rank: int
    size: int

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def place_from_environment() -> Place | None:
    """The place that torchrun or our launcher gave this process; None where none did.

    Raises ConfigError that names every variable that is missing or wrong.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    wrong = [_problem(name) for name in (*_NUMBERS, "MASTER_ADDR")]
    problems = [text for text in wrong if text]
    if not problems:
        place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if place.rank < place.size:
            return place
        problems = [f"RANK={place.rank} is not below WORLD_SIZE={place.size}"]
    raise ConfigError(
        f"expected the variables of torch.distributed; got {', '.join(problems)}; start all ranks "
        "with torchrun, or unset RANK and WORLD_SIZE to have them started here"
    )


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies, however that dies."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    # The launcher passes Ctrl-C on; a rank needs no traceback to end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the kernel was told.
    if os.getppid() != int(launcher):
        os._exit(EXIT_OTHER_RANK)


def event_pipe() -> Callable[[Event], None] | None:
    """The way to the launcher's on_event; None without a launcher."""
    descriptor = os.environ.get(EVENT_FD)
    if descriptor is None:
        return None

    def send(event: Event) -> None:
        line = memoryview((json.dumps(event) + "\n").encode())
        while line:
            line = line[os.write(int(descriptor), line) :]

    return send


def report_end(error: BaseException) -> None:
    """Tell the launcher, if there is one, where `error`, which ends this rank, says that another
    rank is the cause: then it is not this one that the job's outcome names.
    """
    send = event_pipe()
    # A grandchild has inherited the variable, not the rank.
    if send is None or os.environ.get(LAUNCHER_PID) != str(os.getppid()):
        return
    if _is_by_another(_root(error)):
        send({"event": ENDED_BY_ANOTHER})


@functools.cache
def report_uncaught() -> None:
    """From now on report_end() is told of an exception that ends this process."""
    if EVENT_FD not in os.environ:
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


def claim_stdout() -> TextIO:
    """A new file on stdout; what anything else writes there goes to stderr from now on."""
    sys.stdout.flush()
    claimed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return claimed


def _problem(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        return f"no {name}"
    return f"{name}={value!r}" if name in _NUMBERS and not value.isdecimal() else ""
