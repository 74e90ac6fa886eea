"""One step of the device check: a command with a time limit of its own, which nothing outlives."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Machine", "Outcome", "Step", "run_steps"]

# Of a step's output, what goes into the results where it failed.
_TAIL_LINES = 30
# `pytest` found nothing to run.
_NO_TESTS = 5


@dataclass(frozen=True)
class Machine:
    """What steps may need. `num_gpus` is 0 in a rehearsal, whatever the machine has."""

    num_gpus: int
    tools: frozenset[str] = frozenset()
    has_driver: bool = False  # the stand-in driver of tests/fake_cuda, in a rehearsal


# Why a step cannot run on a machine; empty where it can.
Need = Callable[[Machine], str]


@dataclass(frozen=True)
class Step:
    """`command` runs in `folder`, with `env` added; exit code 0 is success."""

    name: str
    command: Sequence[str]
    limit_s: float
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[Need] = ()


@dataclass(frozen=True)
class Outcome:
    """`state`: passed, failed or skipped; `why`: of the latter two, and what a step left out."""

    step: str
    state: str
    why: str
    seconds: float
    output: str = ""

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def run_steps(
    steps: Sequence[Step], machine: Machine, limit_s: float, told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run all, also after a failure, within `limit_s` in all; tell each outcome as it is known."""
    deadline = time.monotonic() + limit_s
    outcomes = []
    for step in steps:
        outcomes.append(_outcome(step, machine, deadline - time.monotonic()))
        told(outcomes[-1])
    return outcomes


def _outcome(step: Step, machine: Machine, left_s: float) -> Outcome:
    reasons = [reason for need in step.needs if (reason := need(machine))]
    if reasons:
        return Outcome(step.name, "skipped", "; ".join(reasons), 0.0)
    if left_s < 1:
        return Outcome(step.name, "skipped", "no time was left for it", 0.0)
    start_s = time.monotonic()
    limit_s = min(step.limit_s, left_s)
    code, output = _run(step, limit_s)
    seconds = round(time.monotonic() - start_s, 1)
    if code is None:
        tail = _tail(output)
        return Outcome(step.name, "failed", f"not done after {limit_s:.0f} s", seconds, tail)
    if code == 0:
        return Outcome(step.name, "passed", _left_out(output), seconds)
    if code == _NO_TESTS and "no tests ran" in output:
        return Outcome(step.name, "failed", "there was nothing to run", seconds, _tail(output))
    return Outcome(step.name, "failed", f"exit code {code}", seconds, _tail(output))


def _run(step: Step, limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: not done in time) and output; all processes of the step have ended."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=step.folder,
                env={**os.environ, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return 127, f"{step.command[0]}: {error}"
        code: int | None
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        _end_group(process)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """What the step left behind would hold the GPU that the next one needs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL_LINES:])


def _left_out(output: str) -> str:
    """What pytest says it has skipped, with its reasons."""
    reasons = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", output, re.MULTILINE)
    return "; ".join(f"left out ({number}): {reason}" for number, reason in reasons)
