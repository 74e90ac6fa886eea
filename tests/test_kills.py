"""A few kills and a stop at random moments, and that a bad end would be seen."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests import kills
from tests.kill_jobs import Start
from tests.ranks import run_ranks


@pytest.mark.parametrize("job", list(kills.JOBS))
def test_killed_rank_is_named_by_all_others(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "JOBS", {job: kills.JOBS[job]})
    before = kills.names_now()
    kill = kills.kill_one(random.Random(job))
    assert kill.problems == ()
    assert not kills.names_that_stay(before)


def test_stopped_rank_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "STOPPED_S", 0.5)
    assert kills.stop_one(random.Random(0)) == []


def _bad_ends(rank: int, size: int, store_path: str, start: Start, seed: str) -> kills.Loss | None:
    """What `kill_one` must not take for good: a silent end, a hang, an error about another."""
    start.connected.release()
    if rank in (1, 3):
        time.sleep(600)
    if rank == 0:
        return None
    return kills.Loss("lost somebody: rank 33", time.monotonic(), True)


def test_survivor_that_hangs_or_names_somebody_else_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kills, "JOBS", {"bad": _bad_ends})
    monkeypatch.setattr(kills, "LIMIT_S", 3.0)
    monkeypatch.setattr("tests.ranks.patient", lambda seconds: seconds)
    rng = random.Random(0)
    monkeypatch.setattr(rng, "randrange", lambda _: 3)
    problems = kills.kill_one(rng, start_s=4.0).problems
    assert [text.split(":")[0] for text in problems] == [
        "rank 0",
        "rank 1",
        "does not name rank 3",
    ]


def _die(rank: int, size: int, store_path: str) -> int:
    time.sleep(60 if rank == 1 else 0)
    return os.getpid()


def test_ranks_can_be_killed_from_outside_meanwhile() -> None:
    seen: list[Any] = []

    def strike(pids: list[int]) -> None:
        seen.extend(pids)
        os.kill(pids[1], signal.SIGKILL)

    outcomes = run_ranks(2, _die, timeout_s=30, meanwhile=strike)
    assert outcomes == [("ok", seen[0]), ("died", -signal.SIGKILL)]
