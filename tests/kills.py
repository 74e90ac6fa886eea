"""Kills, or stops for a while, one rank of a job at a random moment; tells what the others saw.

`python -m tests.kills` (`make kills`) does it 200 times; tests/test_kills.py a few times. Kill
number i of a seed is always the same job, way, victim and moment: `--only i` repeats it.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.kill_jobs import FAIL_TOGETHER, JOBS, LIMIT_S, Loss, Start, exchange_batches
from tests.ranks import run_ranks

SIZE = 4
# A moment is within this of the job's start, or of when all have connected.
LAST_MOMENT_S = 0.7
# Ranks have at least this time to connect.
START_S = 10.0
STOPPED_S = 3.0
# Far more than the two seconds promised: a loaded machine is not a fault.
NOTICED_S = 10.0
WAYS = {
    "shared memory": {},
    "tcp": {"PIPECOMM_TRANSPORT": "tcp"},
    "slots": {"PIPECOMM_STAND_IN_DEVICE": "1"},
}


@dataclass(frozen=True)
class Kill:
    job: str
    way: str
    victim: int
    was_connected: bool
    # From the kill, or from when the survivor asked for something, to its error; the longest.
    seconds: float
    problems: tuple[str, ...]


def kill_one(rng: random.Random, start_s: float = START_S) -> Kill:
    job, victim, way = rng.choice(list(JOBS)), rng.randrange(SIZE), rng.choice(list(WAYS))
    wait_for_moment, connected = _random_moment(rng, start_s)
    killed_at_s = 0.0

    def strike(pids: list[int]) -> None:
        nonlocal killed_at_s
        wait_for_moment()
        killed_at_s = time.monotonic()
        _signal(pids[victim], signal.SIGKILL)

    store = _store()
    outcomes = run_ranks(
        SIZE,
        JOBS[job],
        Start(store.port, start_s, connected),
        str(rng.random()),
        timeout_s=LIMIT_S + 2 * start_s,
        env={**os.environ, **WAYS[way]},
        meanwhile=strike,
    )
    losses = [value for _, value in outcomes if isinstance(value, Loss)]
    return Kill(
        job=job,
        way=way,
        victim=victim,
        was_connected=all(loss.was_connected for loss in losses),
        seconds=max((_seconds(loss, killed_at_s) for loss in losses), default=0.0),
        problems=tuple(_problems(outcomes, victim, job, way, killed_at_s)),
    )


def _seconds(loss: Loss, killed_at_s: float) -> float:
    return loss.at_s - max(killed_at_s, loss.waited_from_s)


def _problems(
    outcomes: list[tuple[str, Any]], victim: int, job: str, way: str, killed_at_s: float
) -> Iterator[str]:
    for rank, (kind, value) in enumerate(outcomes):
        if not (_was_killed((kind, value)) if rank == victim else isinstance(value, Loss)):
            yield f"rank {rank}: {kind}: {_brief(value)}"
        if not isinstance(value, Loss):
            continue
        is_told_by_peer = way == "tcp" and job not in FAIL_TOGETHER
        causes = {victim, *(_ended_before(value, outcomes) if is_told_by_peer else ())}
        if not any(re.search(rf"\b(rank|ranks) ([\d, ]*\b)?{r}\b", value.error) for r in causes):
            yield f"does not name rank {victim}: {value.error}"
        seconds = _seconds(value, killed_at_s)
        if value.was_connected and seconds > NOTICED_S:
            yield f"rank {rank} waited {seconds:.1f} s: {value.error}"


def _ended_before(loss: Loss, outcomes: list[tuple[str, Any]]) -> Iterator[int]:
    """Survivors whose own end may be seen first: connections do not wait for each other, and a
    rank of the backend does not tell of a loss that is no matter of the peer's.
    """
    for rank, (_, value) in enumerate(outcomes):
        if isinstance(value, Loss) and value.at_s < loss.at_s:
            yield rank


def _store() -> dist.TCPStore:
    """One that no rank can leave half written."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _random_moment(rng: random.Random, start_s: float) -> tuple[Callable[[], None], Any]:
    """How to wait for it, and the semaphore by which the ranks tell that they are connected."""
    connected: Any = multiprocessing.get_context("forkserver").Semaphore(0)
    is_running, seconds = rng.random() < 0.75, rng.uniform(0, LAST_MOMENT_S)

    def wait() -> None:
        for _ in range(SIZE if is_running else 0):
            connected.acquire(timeout=start_s)
        time.sleep(seconds)

    return wait, connected


def _brief(value: object) -> object:
    """Of an exception, without its traceback."""
    return value[0] if isinstance(value, tuple) else value


def _was_killed(outcome: tuple[str, object]) -> bool:
    return outcome == ("died", -signal.SIGKILL)


def stop_one(rng: random.Random, start_s: float = START_S) -> list[str]:
    """Stop a rank for some seconds while all exchange; what went wrong."""
    victim = rng.randrange(SIZE)
    wait_for_moment, connected = _random_moment(rng, start_s)

    def strike(pids: list[int]) -> None:
        wait_for_moment()
        _signal(pids[victim], signal.SIGSTOP)
        time.sleep(STOPPED_S)
        _signal(pids[victim], signal.SIGCONT)

    ends_s = LAST_MOMENT_S + STOPPED_S + 1
    store = _store()
    args = (Start(store.port, start_s, connected), str(rng.random()), ends_s)
    outcomes = run_ranks(SIZE, exchange_batches, *args, timeout_s=LIMIT_S, meanwhile=strike)
    return [
        f"rank {rank} when rank {victim} was stopped: {kind}: {_brief(value)}"
        for rank, (kind, value) in enumerate(outcomes)
        if (kind, value) != ("ok", None)
    ]


def start_all(seed: int) -> float:
    """The seconds in which ranks that nobody kills start, connect, exchange a batch and end."""
    connected: Any = multiprocessing.get_context("forkserver").Semaphore(0)
    start = time.monotonic()
    store = _store()
    args = (Start(store.port, LIMIT_S, connected), str(seed), 0.0)
    outcomes = run_ranks(SIZE, exchange_batches, *args, timeout_s=LIMIT_S)
    if outcomes != [("ok", None)] * SIZE:
        raise AssertionError(f"expected ranks that start and end; got {outcomes}")
    return time.monotonic() - start


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
    groups: dict[str, list[float]] = {}
    for kill in kills:
        when = "after" if kill.was_connected else "before"
        groups.setdefault(f"{when} all had connected", []).append(kill.seconds)
        groups.setdefault(f"of {kill.job} by {kill.way}", []).append(kill.seconds)
    for name, seconds in sorted(groups.items()):
        print(
            f"{len(seconds)} kills {name}: the last survivor raised after "
            f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3, help="jobs that run at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one kill")
    options = parser.parse_args()
    is_one = options.only is not None
    numbers = [options.only] if is_one else range(options.kills)
    num_stops = 0 if is_one else options.stops
    before = names_now()
    with ThreadPoolExecutor(options.at_once) as threads:
        start_all(0)  # the server that ranks are forked from starts with the first
        start_s = max(START_S, 3 * max(threads.map(start_all, range(options.at_once))))
        print(f"ranks have {start_s:.0f} s to connect")
        kill = partial(kill_one, start_s=start_s)
        kills = list(threads.map(kill, _generators(numbers, options.seed)))
        _tell(kills)
        stop = partial(stop_one, start_s=start_s)
        stops = list(threads.map(stop, _generators(range(num_stops), options.seed)))
    problems = [
        f"kill {number}, {kill.job} by {kill.way}: {text}"
        for number, kill in zip(numbers, kills, strict=True)
        for text in kill.problems
    ]
    problems += [text for texts in stops for text in texts]
    problems += [f"left behind: {name}" for name in names_that_stay(before)]
    print(*problems, sep="\n")
    print(f"{len(kills)} kills, {num_stops} stops: {len(problems)} problems")
    return 1 if problems else 0


def _generators(numbers: Iterable[int], seed: int) -> list[random.Random]:
    return [random.Random(f"{seed}/{number}") for number in numbers]


if __name__ == "__main__":
    sys.exit(main())
