"""Ranks that meet again on one store: whoever is late, whatever the last attempt left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipecomm
from pipecomm.errors import StageFailedError, TransportError
from pipecomm.links.generation import NewGenerationError, Seat
from tests.ranks import spawn_ranks

_LATE_S = 0.5


def test_rank_sits_in_the_generation_that_others_wait_in() -> None:
    store = dist.HashStore()
    assert [Seat(store, rank).generation for rank in range(3)] == [0, 0, 0]


def test_rank_that_comes_again_begins_a_generation_and_the_others_move_on() -> None:
    store = dist.HashStore()
    waiting, _ended = Seat(store, 0), Seat(store, 1)
    again = Seat(store, 1)
    assert again.generation == 1
    with pytest.raises(NewGenerationError):
        waiting.look()
    waiting.take()
    assert waiting.generation == 1
    waiting.look()


def test_process_whose_rank_has_come_again_is_refused() -> None:
    store = dist.HashStore()
    left_over = Seat(store, 0)
    Seat(store, 0)
    with pytest.raises(TransportError, match="only process with rank 0"):
        left_over.take()


def test_announced_failure_counts_for_its_generation_only() -> None:
    store = dist.HashStore()
    first, second = Seat(store, 0), Seat(store, 1)
    second.announce("out of luck")
    second.announce("what came of it")
    with pytest.raises(StageFailedError, match="out of luck"):
        first.look()
    for again in (Seat(store, 0), Seat(store, 1)):
        assert again.generation == 1
        again.look()


def test_store_that_is_gone_says_nothing(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    seat = Seat(client, 0)
    del server
    seat.look()
    seat.announce("nobody hears it")


def _attempt(
    rank: int, size: int, _: str, port: int, kind: str, late: int, failing: int
) -> tuple[int, str]:
    """Train or exchange once; the rank `failing` announces a failure instead."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == late:
        time.sleep(_LATE_S)
    use = _use_pipeline if kind == "pipeline" else _use_backend
    try:
        return use(rank, size, store, failing == rank)
    except (pipecomm.PipecommError, MemoryError) as error:
        return 0, f"{type(error).__name__}: {error}"


def _use_pipeline(rank: int, size: int, store: dist.Store, fails: bool) -> tuple[int, str]:
    dist.init_process_group("pipecomm", rank=rank, world_size=size, store=store)
    options: dict[str, Any] = {"codec": "int3"} if fails else {}
    stage = torch.nn.Linear(4, 4)
    for _ in range(2):  # several pipelines in a process
        pipeline = pipecomm.Pipeline(
            stage, loss_fn=torch.nn.functional.mse_loss, timeout_s=30, **options
        )
        with pipeline:
            pipeline.train_step(torch.ones(2, 4), torch.ones(2, 4))
    return sum(p.grad is not None for p in stage.parameters()), "trained"


def _use_backend(rank: int, size: int, store: dist.Store, fails: bool) -> tuple[int, str]:
    options = {"pg_options": 7} if fails else {}
    dist.init_process_group(
        "pipecomm",
        rank=rank,
        world_size=size,
        store=store,
        timeout=timedelta(seconds=30),
        **options,  # type: ignore[arg-type]
    )
    got = torch.zeros(1)
    work = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    work.wait()
    dist.barrier()
    return int(got.item()), "exchanged"


def _two_attempts(kind: str, size: int, late: int, failing: int) -> list[list[tuple[int, str]]]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [
        spawn_ranks(size, _attempt, server.port, kind, late, number, timeout_s=60)
        for number in (failing, -1)
    ]


@pytest.mark.parametrize("failing", [-1, 0])
@pytest.mark.parametrize(("size", "late"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["pipeline", "backend"])
def test_job_that_starts_again_on_its_store_works_whichever_rank_is_late(
    kind: str, size: int, late: int, failing: int
) -> None:
    first, second = _two_attempts(kind, size, late, failing)
    done = "trained" if kind == "pipeline" else "exchanged"
    if failing == -1:
        assert [text for _, text in first] == [done] * size
    else:
        assert first[0][1].startswith("ConfigError")
        for _, text in first[1:]:
            assert text.startswith("StageFailedError: rank 0 cannot")
    assert [text for _, text in second] == [done] * size
    expected = [2] * size if kind == "pipeline" else [(rank - 1) % size for rank in range(size)]
    assert [number for number, _ in second] == expected


_SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import pipecomm

attempt, late = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[1])
dist.init_process_group("pipecomm")
rank = dist.get_rank()
if attempt == 1 and rank == late:
    time.sleep(1)
stage = torch.nn.Linear(4, 4)
with pipecomm.Pipeline(stage, loss_fn=torch.nn.functional.mse_loss, timeout_s=60) as pipeline:
    pipeline.train_step(torch.ones(2, 4), torch.ones(2, 4))
    dist.barrier()
    if attempt == 0:
        sys.exit(1 if rank == 1 else 0)
print(f"attempt {attempt} trained on rank {rank}")
"""


def test_pipeline_trains_after_a_restart_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node", "2", str(script), "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "attempt 1 trained on rank 0" in done.stdout
    assert "attempt 1 trained on rank 1" in done.stdout
