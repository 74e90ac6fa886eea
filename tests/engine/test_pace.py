"""The host waits when it is too far ahead of a device, and never for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomm.engine.pace import Pace


class FakeEvent:
    """Notes in `log` when it is recorded and waited for."""

    log: list[str]

    def __init__(self, blocking: bool) -> None:
        assert blocking
        self.number = len([line for line in self.log if line.startswith("record")])

    def record(self, stream: Any) -> None:
        self.log.append(f"record {self.number} on {stream}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeEvent.log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return FakeEvent.log


def test_oldest_work_is_waited_for_when_too_much_is_ahead(log: list[str]) -> None:
    pace = Pace(torch.device("cuda", 0), 2)
    for _ in range(4):
        pace.add()
    assert [line.split(" on ")[0] for line in log] == [
        *("record 0", "record 1", "record 2", "wait 0", "record 3", "wait 1"),
    ]
    assert log[0] == "record 0 on stream of cuda:0"


def test_cpu_is_never_waited_for(log: list[str]) -> None:
    pace = Pace(torch.device("cpu"), 1)
    for _ in range(10):
        pace.add()
    assert log == []
