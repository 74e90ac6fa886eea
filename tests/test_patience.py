"""Limits grow with the machine's slowness and its load, and never shrink."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest

from tests import patience
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("slowness", "load", "expected_s"), [("0.5", 0.0, 10), ("2.4", 1.0, 24), ("1", 8.0, 40)]
)
def test_limit_is_longer_on_a_slow_or_busy_machine_only(
    monkeypatch: pytest.MonkeyPatch, slowness: str, load: float, expected_s: float
) -> None:
    monkeypatch.setenv("PIPECOMM_TEST_SLOWNESS", slowness)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert patience.patient(10) == pytest.approx(expected_s)


def test_slowness_is_measured_once_and_known_to_all_that_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def slow(*args: Any, **options: Any) -> None:
        calls.append(args)
        time.sleep(0.1)

    monkeypatch.setenv("PIPECOMM_TEST_SLOWNESS", "")
    monkeypatch.delenv("PIPECOMM_TEST_SLOWNESS")
    monkeypatch.setattr(subprocess, "run", slow)
    monkeypatch.setattr(patience, "_REFERENCE_S", 0.01)
    patience.measure_once()
    patience.measure_once()
    assert len(calls) == 1
    assert float(os.environ["PIPECOMM_TEST_SLOWNESS"]) >= 10


def _take(rank: int, size: int, store_path: str, seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@pytest.mark.parametrize(("slowness", "outcome"), [("20", "ok"), ("1", "hung")])
def test_ranks_of_a_slow_machine_are_given_its_time(
    monkeypatch: pytest.MonkeyPatch, slowness: str, outcome: str
) -> None:
    monkeypatch.setenv("PIPECOMM_TEST_SLOWNESS", slowness)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert run_ranks(1, _take, 5.0, timeout_s=1.0)[0][0] == outcome
