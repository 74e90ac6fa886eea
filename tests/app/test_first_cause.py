"""Which rank a failed job names: the first cause, whoever reacts first, in pipelines of three.

Each rank trains in a script of its own; one of them does something else after some steps.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from pipecomm.app.launcher import Outcome, launch

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


def outcome_of(how: str, cause: int, *, early: bool = False, call: str = PLAIN) -> Outcome:
    script = SCRIPT.format(root=str(ROOT), how=how, early=early, cause=cause, call=call)
    return launch([sys.executable, "-c", script], 3, on_event=lambda event: None)


@pytest.mark.parametrize("cause", range(3))
@pytest.mark.parametrize("way", WAYS)
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


def test_survivor_that_wraps_the_error_is_not_named() -> None:
    outcome = outcome_of("sys.exit(3)", 2, call=WRAPPED)
    assert (outcome.exit_code, "rank 2 of 3" in outcome.text) == (3, True), outcome.text
