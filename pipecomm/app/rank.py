"""A rank's side of a job: which rank it is, its tie to the launcher, where its output goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from pipecomm import settings
from pipecomm.errors import ConfigError

__all__ = [
    "EXIT_OTHER_RANK",
    "JobRank",
    "claim_stdout",
    "die_with_launcher",
    "rank_from_environment",
]

#: Exit code of a rank that ends because another one failed or was lost.
EXIT_OTHER_RANK = 3

_PR_SET_PDEATHSIG = 1
_NUMBERS = (settings.RANK, settings.WORLD_SIZE, settings.MASTER_PORT)


@dataclass(frozen=True)
class JobRank:
    """This process is `rank` of `size`."""

    rank: int
    size: int

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def rank_from_environment() -> JobRank | None:
    """Which rank torchrun or our launcher made of this process; None where neither did.

    Raises ConfigError that names every variable that is missing or wrong.
    """
    if settings.RANK.text() is None and settings.WORLD_SIZE.text() is None:
        return None
    wrong = [_problem(setting) for setting in (*_NUMBERS, settings.MASTER_ADDR)]
    problems = [text for text in wrong if text]
    if not problems:
        me = JobRank(settings.RANK.value(), settings.WORLD_SIZE.value())
        if me.rank < me.size:
            return me
        problems = [f"RANK={me.rank} is not below WORLD_SIZE={me.size}"]
    raise ConfigError(
        f"expected the variables of torch.distributed; got {', '.join(problems)}; start all ranks "
        "with torchrun, or unset RANK and WORLD_SIZE to have them started here"
    )


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies, however that dies."""
    if settings.LAUNCHER_PID.text() is None:
        return
    launcher = settings.LAUNCHER_PID.value()
    # The launcher passes Ctrl-C on; a rank needs no traceback to end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the kernel was told.
    if os.getppid() != launcher:
        os._exit(EXIT_OTHER_RANK)


def claim_stdout() -> TextIO:
    """A new file on stdout; what anything else writes there goes to stderr from now on."""
    sys.stdout.flush()
    claimed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return claimed


def _problem(setting: settings.Setting[Any]) -> str:
    if setting.text() is None:
        return f"no {setting.name}"
    try:
        setting.value()
    except ConfigError:
        return f"{setting.name}={setting.text()!r}"
    return ""
