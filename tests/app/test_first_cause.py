"""Which rank a failed job names: the first cause, whoever reacts first, in pipelines of three.

Each rank trains in a script of its own, or in `pipecomm train`; one of them does something else
after some steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipecomm.app.launcher import Outcome, launch
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import ctypes, os, signal, sys
sys.path.insert(0, {root!r})
from datetime import timedelta
import torch
import torch.distributed as dist
import pipecomm
rank = int(os.environ["RANK"])
torch.set_num_threads(1)

def misbehave():
    {how}

def main():
    dist.init_process_group("pipecomm", timeout=timedelta(seconds=60))
    if {early} and rank == {cause}:
        return misbehave()
    pipeline = pipecomm.Pipeline(
        torch.nn.Linear(4, 4), num_microbatches=2, timeout_s=60, loss_fn=torch.nn.MSELoss()
    )
    for step in range(10**6):
        if step == 3 and rank == {cause}:
            return misbehave()
        pipeline.train_step(torch.ones(4, 4), torch.ones(4, 4))

{call}
"""
PLAIN = "main()"
# As a launcher of its own would: the survivors' exceptions are wrapped before they end them.
WRAPPED = """
try:
    main()
except ConnectionError as error:
    raise RuntimeError("training failed") from error
"""

WAYS = {
    "raises": ("raise ValueError('boom')", 1, "failed with exit code 1"),
    "returns": ("return", 1, "ended, with exit code 0, while others still needed it"),
    "exits with 3": ("sys.exit(3)", 3, "failed with exit code 3"),
    "exits with 0": ("os._exit(0)", 1, "ended, with exit code 0, while others still needed it"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "SIGKILL"),
    "crashes": ("ctypes.string_at(0)", 128 + signal.SIGSEGV, "SIGSEGV"),
}


def ways_and_causes(*ways: str) -> list[Any]:
    """Every way in every rank; those are slow that are not the first of their way."""
    return [
        pytest.param(way, cause, marks=[] if cause == index % 3 else pytest.mark.slow)
        for index, way in enumerate(ways)
        for cause in range(3)
    ]


def outcome_of(how: str, cause: int, *, early: bool = False, call: str = PLAIN) -> Outcome:
    script = SCRIPT.format(root=str(ROOT), how=how, early=early, cause=cause, call=call)
    return launch([sys.executable, "-c", script], 3, on_event=lambda event: None)


@pytest.mark.parametrize(("way", "cause"), ways_and_causes(*WAYS))
def test_rank_that_ends_between_steps_is_named_with_its_code(way: str, cause: int) -> None:
    how, code, text = WAYS[way]
    outcome = outcome_of(how, cause)
    assert (outcome.exit_code, f"rank {cause} of 3" in outcome.text) == (code, True), outcome.text
    assert text in outcome.text


@pytest.mark.parametrize("way", ["raises", "exits with 3"])
def test_rank_that_ends_while_the_others_connect_is_named(way: str) -> None:
    how, code, _ = WAYS[way]
    outcome = outcome_of(how, 2, early=True)
    assert (outcome.exit_code, "rank 2 of 3" in outcome.text) == (code, True), outcome.text


def test_rank_that_needs_long_to_end_after_its_goodbye_is_named() -> None:
    how = "import atexit, time; atexit.register(time.sleep, 5); return"
    outcome = outcome_of(how, 1)
    assert (outcome.exit_code, "rank 1 of 3" in outcome.text) == (1, True), outcome.text
    assert WAYS["returns"][2] in outcome.text


def test_survivor_that_wraps_the_error_is_not_named() -> None:
    outcome = outcome_of("sys.exit(3)", 2, call=WRAPPED)
    assert (outcome.exit_code, "rank 2 of 3" in outcome.text) == (3, True), outcome.text


# Found by every Python whose path has it: one rank of a training does as told instead of a step.
MISBEHAVIOUR = """
import ctypes, os, signal, sys
if os.environ.get("RANK") == "{cause}":
    from pipecomm.app.train import _Run
    step = _Run._step
    def misbehave(self, pipeline, number):
        if number == 3:
            {how}
        return step(self, pipeline, number)
    _Run._step = misbehave
"""
TRAINING = [
    *("train", "--stages=3", "--layers=3", "--width=8", "--heads=2", "--sequence-length=8"),
    *("--batch-size=4", "--microbatches=2", "--held-out-batches=1", "--steps=1000000", "--json"),
]


@pytest.mark.parametrize(("way", "cause"), ways_and_causes("raises", "exits early", "exits with 3"))
def test_rank_that_ends_in_a_training_of_the_command_line_is_named(
    tmp_path: Path, way: str, cause: int
) -> None:
    how, code, text = {**WAYS, "exits early": ("sys.exit(0)", *WAYS["returns"][1:])}[way]
    (tmp_path / "sitecustomize.py").write_text(MISBEHAVIOUR.format(cause=cause, how=how))
    process = subprocess.run(
        [sys.executable, "-m", "pipecomm", *TRAINING],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=patient(120.0),
    )
    error = json.loads(process.stdout)["error"]
    assert (process.returncode, f"rank {cause} of 3" in error) == (code, True), process.stderr
    assert text in error
