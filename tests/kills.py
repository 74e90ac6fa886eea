"""Kills, or stops for a while, one rank of a job at a random moment; tells what the others saw.

`python -m tests.kills` (`make kills`) does it 200 times; tests/test_kills.py a few times.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipecomm.errors import PipecommError
from pipecomm.pipeline import Pipeline
from tests.backend_ranks import init
from tests.ranks import run_ranks

SIZE = 4
# A rank that dies before all have connected is missed by nobody until the others' time is over.
START_TIMEOUT_S = 4.0
# A moment is within this of the job's start, or of when all have connected.
LAST_MOMENT_S = 0.7
STOPPED_S = 3.0
LIMIT_S = 60.0


@dataclass(frozen=True)
class Loss:
    """What ended a survivor: when (time.monotonic), and whether all ranks had connected."""

    error: str
    at_s: float
    was_connected: bool


@dataclass(frozen=True)
class Kill:
    job: str
    victim: int
    was_connected: bool
    seconds: float  # from the kill to the last survivor's error
    problems: tuple[str, ...]


def exchange_batches(
    rank: int, size: int, store_path: str, connected: Any, ends_s: float = float("inf")
) -> Loss | None:
    """Batches of random size between all, until rank 0 says after `ends_s` that it is the last.

    `connected` is a semaphore, released by each rank.
    """
    is_connected = False
    try:
        init(rank, size, store_path, timeout=timedelta(seconds=START_TIMEOUT_S))
        is_connected = True
        connected.release()
        dist.group.WORLD.set_timeout(timedelta(seconds=LIMIT_S))
        rng, end = random.Random(0), time.monotonic() + ends_s
        is_last = False
        while not is_last:
            is_last = _exchange(rank, size, int(2 ** rng.uniform(0, 20)), time.monotonic() > end)
        dist.destroy_process_group()
    except (PipecommError, dist.DistError) as error:
        return Loss(str(error), time.monotonic(), is_connected)
    return None


def _exchange(rank: int, size: int, numel: int, is_over: bool) -> bool:
    """Each rank's own number to and from all others; True when rank 0 says that it is over."""
    peers = [peer for peer in range(size) if peer != rank]
    sent = torch.full((numel,), rank + size * is_over, dtype=torch.int32)
    got = {peer: torch.empty_like(sent) for peer in peers}
    calls = [dist.P2POp(dist.irecv, got[peer], peer) for peer in peers]
    calls += [dist.P2POp(dist.isend, sent, peer) for peer in peers]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    for peer in peers:
        if not bool((got[peer] == got[peer][0]).all()) or int(got[peer][0]) % size != peer:
            raise AssertionError(f"rank {rank} got something else from rank {peer}: {got[peer]}")
    return is_over if rank == 0 else int(got[0][0]) >= size


def train(rank: int, size: int, store_path: str, connected: Any) -> Loss:
    is_connected = False
    try:
        init(rank, size, store_path, timeout=timedelta(seconds=START_TIMEOUT_S))
        stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        with Pipeline(
            stage, num_microbatches=8, loss_fn=nn.functional.mse_loss, timeout_s=START_TIMEOUT_S
        ) as pipeline:
            is_connected = True
            connected.release()
            rows = torch.ones(64, 64)
            while True:
                pipeline.train_step(rows if rank == 0 else None, rows if rank == size - 1 else None)
    except (PipecommError, dist.DistError) as error:
        return Loss(str(error), time.monotonic(), is_connected)


JOBS: dict[str, Callable[..., Any]] = {"exchange": exchange_batches, "train": train}


def kill_one(rng: random.Random) -> Kill:
    job, victim = rng.choice(list(JOBS)), rng.randrange(SIZE)
    wait_for_moment, connected = _random_moment(rng)
    killed_at_s = 0.0

    def strike(pids: list[int]) -> None:
        nonlocal killed_at_s
        wait_for_moment()
        killed_at_s = time.monotonic()
        _signal(pids[victim], signal.SIGKILL)

    outcomes = run_ranks(SIZE, JOBS[job], connected, timeout_s=LIMIT_S, meanwhile=strike)
    losses = [value for _, value in outcomes if isinstance(value, Loss)]
    problems = [
        f"rank {rank}: {kind}: {_brief(value)}"
        for rank, (kind, value) in enumerate(outcomes)
        if not (_was_killed((kind, value)) if rank == victim else isinstance(value, Loss))
    ]
    problems += [
        f"does not name rank {victim}: {loss.error}"
        for loss in losses
        if not re.search(rf"\b(rank|ranks) ([\d, ]*\b)?{victim}\b", loss.error)
    ]
    return Kill(
        job=job,
        victim=victim,
        was_connected=all(loss.was_connected for loss in losses),
        seconds=max((loss.at_s for loss in losses), default=killed_at_s) - killed_at_s,
        problems=tuple(problems),
    )


def _random_moment(rng: random.Random) -> tuple[Callable[[], None], Any]:
    """How to wait for it, and the semaphore by which the ranks tell that they are connected."""
    connected: Any = multiprocessing.get_context("forkserver").Semaphore(0)
    is_running, seconds = rng.random() < 0.75, rng.uniform(0, LAST_MOMENT_S)

    def wait() -> None:
        for _ in range(SIZE if is_running else 0):
            connected.acquire(timeout=START_TIMEOUT_S)
        time.sleep(seconds)

    return wait, connected


def _brief(value: object) -> object:
    """Of an exception, without its traceback."""
    return value[0] if isinstance(value, tuple) else value


def _was_killed(outcome: tuple[str, object]) -> bool:
    return outcome == ("died", -signal.SIGKILL)


def stop_one(rng: random.Random) -> list[str]:
    """Stop a rank for some seconds while all exchange; what went wrong."""
    victim = rng.randrange(SIZE)
    wait_for_moment, connected = _random_moment(rng)

    def strike(pids: list[int]) -> None:
        wait_for_moment()
        _signal(pids[victim], signal.SIGSTOP)
        time.sleep(STOPPED_S)
        _signal(pids[victim], signal.SIGCONT)

    ends_s = LAST_MOMENT_S + STOPPED_S + 1
    args = (connected, ends_s)
    outcomes = run_ranks(SIZE, exchange_batches, *args, timeout_s=LIMIT_S, meanwhile=strike)
    return [
        f"rank {rank} when rank {victim} was stopped: {kind}: {_brief(value)}"
        for rank, (kind, value) in enumerate(outcomes)
        if (kind, value) != ("ok", None)
    ]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # It has ended by itself; its outcome tells why.
        os.kill(pid, number)


def names_that_stay(before: set[str], within_s: float = 30.0) -> set[str]:
    """What is left behind. Other jobs of this machine have names too, but come and go."""
    left = names_now() - before
    deadline = time.monotonic() + within_s
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= names_now()
    return left


def names_now() -> set[str]:
    """Files of shared memory, and sockets."""
    sockets = re.findall(r"@(pipecomm-\w+)", Path("/proc/net/unix").read_text())
    files = [path.name for path in Path("/dev/shm").iterdir() if "pipecomm" in path.name]
    return {*sockets, *files}


def _tell(kills: list[Kill]) -> None:
    for was_connected in (False, True):
        seconds = [kill.seconds for kill in kills if kill.was_connected is was_connected]
        if seconds:
            print(
                f"{len(seconds)} kills {'after' if was_connected else 'before'} all had connected: "
                f"the last survivor raised after {statistics.median(seconds):.2f} s (median), "
                f"{max(seconds):.2f} s (most)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3, help="jobs that run at the same time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before = names_now()
    with ThreadPoolExecutor(options.at_once) as threads:
        kills = list(threads.map(kill_one, _generators(options.kills, options.seed)))
        _tell(kills)
        stops = list(threads.map(stop_one, _generators(options.stops, options.seed)))
    problems = [f"{kill.job}: {text}" for kill in kills for text in kill.problems]
    problems += [text for texts in stops for text in texts]
    problems += [f"left behind: {name}" for name in names_that_stay(before)]
    print(*problems, sep="\n")
    print(f"{options.kills} kills, {options.stops} stops: {len(problems)} problems")
    return 1 if problems else 0


def _generators(count: int, seed: int) -> list[random.Random]:
    return [random.Random(f"{seed}/{index}") for index in range(count)]


if __name__ == "__main__":
    sys.exit(main())
