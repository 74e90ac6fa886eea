"""A rank's side of a job: its number from the environment, its events, its stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipecomm.app.rank import JobRank, rank_from_environment
from pipecomm.errors import ConfigError
from pipecomm.outcome import event_pipe

ROOT = Path(__file__).resolve().parent.parent.parent
COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_rank_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **COMPLETE)
    assert rank_from_environment() == JobRank(rank=1, size=2)


@pytest.mark.parametrize("left", [{}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}])
def test_rank_without_rank_and_size_is_none(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, str]
) -> None:
    set_environment(monkeypatch, **left)
    assert rank_from_environment() is None


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"RANK": "0"}, ["no WORLD_SIZE", "no MASTER_PORT", "no MASTER_ADDR", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["no RANK"]),
        ({**COMPLETE, "MASTER_PORT": "abc", "RANK": "-1"}, ["MASTER_PORT='abc'", "RANK='-1'"]),
        ({**COMPLETE, "RANK": "5"}, ["RANK=5 is not below WORLD_SIZE=2"]),
        ({**COMPLETE, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ],
)
def test_incomplete_environment_is_refused_with_all_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], texts: list[str]
) -> None:
    set_environment(monkeypatch, **values)
    with pytest.raises(ConfigError) as caught:
        rank_from_environment()
    assert [text for text in texts if text not in str(caught.value)] == []


@pytest.mark.parametrize(("rank", "is_last"), [(0, False), (1, False), (2, True)])
def test_only_the_last_rank_is_last(rank: int, is_last: bool) -> None:
    assert JobRank(rank, 3).is_last is is_last


def test_events_are_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("PIPECOMM_EVENT_FD", str(writer))
    send = event_pipe()
    assert send is not None
    send({"event": "step", "loss": 1.5})
    send({"event": "result", "text": "two\nlines"})
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [
            {"event": "step", "loss": 1.5},
            {"event": "result", "text": "two\nlines"},
        ]


def test_events_without_a_launcher_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECOMM_EVENT_FD", raising=False)
    assert event_pipe() is None


def test_claimed_stdout_is_the_only_way_to_stdout() -> None:
    script = """
import os, sys
print("before")
from pipecomm.app.rank import claim_stdout
stdout = claim_stdout()
print("print")
sys.stdout.flush()
os.write(1, b"write\\n")
os.system("echo child")
print("claimed", file=stdout, flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "before\nclaimed\n"
    assert ended.stderr.splitlines() == ["print", "write", "child"]
