"""Ranks on this host that run one function of a benchmark and give its rows."""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["rows_of_ranks"]

Rows = list[dict[str, Any]]


def rows_of_ranks(
    size: int, work: Callable[[int, argparse.Namespace], Rows], options: argparse.Namespace
) -> Rows:
    """What work(rank, options) gives on rank 0; all ranks run it, one thread each, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.pt"
        mp.spawn(_run, (size, _free_port(), path, work, options), nprocs=size)
        rows: Rows = torch.load(path)
    return rows


def _run(
    rank: int,
    size: int,
    port: int,
    path: Path,
    work: Callable[[int, argparse.Namespace], Rows],
    options: argparse.Namespace,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    rows = work(rank, options)
    if rank == 0:
        torch.save(rows, path)
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
