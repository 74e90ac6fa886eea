"""A hang report: what another process waits for, asked from outside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pipecomm._native import core
from pipecomm.app.cli import main
from pipecomm.errors import ConfigError, LinkTimeoutError
from tests.drop_in.backend_ranks import init
from tests.patience import patient
from tests.ranks import spawn_ranks


def _asked_while_it_waits(rank: int, size: int, store_path: str) -> str:
    init(rank, size, store_path)
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 0)
    if rank == 0:
        dist.recv(torch.zeros(4), 1, tag=3)
        return ""
    text, deadline = "", time.monotonic() + patient(20)
    while "receive from" not in text and time.monotonic() < deadline:
        text = core.hang_report(int(pid))
    dist.send(torch.ones(4), 0, tag=3)
    return str(text)


def test_report_of_a_process_in_a_blocking_call_says_what_for() -> None:
    text = spawn_ranks(2, _asked_while_it_waits)[1]
    assert "receive from rank 1 (tag 3): float32 [4] (16 bytes), for " in text
    assert "rank 0 of process group 'the default process group'" in text


def _asked_while_it_is_stopped(rank: int, size: int, store_path: str) -> str:
    init(rank, size, store_path)
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 0)
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
        return ""
    os.kill(int(pid), signal.SIGSTOP)
    try:
        with pytest.raises(LinkTimeoutError, match="may be stopped") as silence:
            core.hang_report(int(pid), timeout_s=0.5)
    finally:
        os.kill(int(pid), signal.SIGCONT)
    dist.send(torch.zeros(1), 0)
    return str(silence.value)


def test_stopped_process_does_not_keep_the_asker() -> None:
    assert "expected an answer from process" in spawn_ranks(2, _asked_while_it_is_stopped)[1]


def test_process_without_transfers_is_told_from_a_hanging_one() -> None:
    with pytest.raises(ConfigError, match="nobody answers as process 1;"):
        core.hang_report(1)


def _doctor_attached(rank: int, size: int, store_path: str) -> tuple[int, str]:
    init(rank, size, store_path)
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 0)
    if rank == 0:
        dist.recv(torch.zeros(4), 1, tag=3)
        return 0, ""
    code, document, deadline = 0, "", time.monotonic() + patient(20)
    while "receive from" not in document and time.monotonic() < deadline:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["doctor", "--attach", str(int(pid)), "--json"])
        document = out.getvalue()
    dist.send(torch.ones(4), 0, tag=3)
    return code, document


def test_doctor_attaches_to_a_process_that_hangs() -> None:
    code, document = spawn_ranks(2, _doctor_attached)[1]
    assert code == 0
    assert "receive from rank 1 (tag 3)" in json.loads(document)["report"]


def test_doctor_says_when_there_is_nobody_to_attach_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--attach", "1"]) == 2
    assert "nobody answers as process 1;" in capsys.readouterr().err
