"""tests/ranks.py: each rank's outcome is told as it was, also when several jobs run at once."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import forkserver
from typing import Any

import pytest

from tests.ranks import RankFailure, run_ranks, spawn_ranks


def _do(rank: int, size: int, store_path: str, what: str) -> int:
    if what == "exit" and rank == 0:
        os._exit(3)
    if what == "raise" and rank == 0:
        raise ValueError("boom")
    if what == "hang" and rank == 0:
        time.sleep(600)
    return rank


def test_outcomes_are_in_the_order_of_the_ranks() -> None:
    assert run_ranks(3, _do, "return") == [("ok", 0), ("ok", 1), ("ok", 2)]
    assert spawn_ranks(2, _do, "return") == [0, 1]


def test_rank_that_raises_is_told_with_its_traceback() -> None:
    kind, (brief, whole) = run_ranks(2, _do, "raise")[0]
    assert (kind, brief) == ("raised", "ValueError('boom')")
    assert "in _do" in whole
    with pytest.raises(RankFailure, match=r"rank 0: raised: (?s:.*)boom"):
        spawn_ranks(2, _do, "raise")


def test_rank_that_hangs_is_ended_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.patient", lambda seconds: seconds)
    assert run_ranks(2, _do, "hang", timeout_s=10.0) == [("hung", 10.0), ("ok", 1)]


def test_exit_code_is_right_when_another_job_starts_as_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be read once; the start of any process looks after all children."""
    read, reader = forkserver.read_signed, threading.get_ident()
    other = threading.Thread(target=run_ranks, args=(1, _do, "return"))
    num_reads = 0

    def read_late(descriptor: int) -> Any:
        nonlocal num_reads
        if threading.get_ident() == reader:
            num_reads += 1  # the first one is of the process id
            if num_reads == 2:
                other.start()
                other.join(1.0)
        return read(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_late)
    assert run_ranks(1, _do, "exit") == [("died", 3)]
    other.join()
    assert num_reads == 2
