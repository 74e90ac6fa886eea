"""What does it save that a receiver reads a tensor in pool memory where it lies?

One way between two ranks of one host, as in p2p.py: a tensor of a pool, which is copied once, by
the receiver; another one, which is copied into the ring and out of it; gloo; and one copy alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Timing, add_options, measure, report
from p2p import BACKENDS, Calls, CopyLimit, there_and_back

import pipecomm

CASES = ((1 << 20, 5), (8 << 20, 1), (16 << 20, 1), (64 << 20, 1))


def copy_there_and_back(limit: CopyLimit, nbytes: int, repeats: int) -> None:
    """What it costs at least: rank 1 copies what rank 0 wrote last, then the other way round."""
    zero, one = limit.ring.split(len(limit.ring) // 2)
    for _ in range(repeats):
        for reader, target, source in ((1, one, zero), (0, zero, one)):
            limit.meet()
            if limit.rank == reader:
                target[: nbytes // 4].copy_(source[: nbytes // 4])
    limit.meet()


def calls_of(rank: int, nbytes: int, repeats: int, limit: CopyLimit) -> Calls:
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    plain = torch.randn(nbytes // 4)
    pooled = pipecomm.MemoryPool().empty((nbytes // 4,), torch.float32).copy_(plain)

    def exchange(name: str, tensor: torch.Tensor) -> None:
        there_and_back(rank, tensor, groups[name], repeats)

    expected = plain.clone()
    dist.broadcast(expected, 0)
    for tensor in (plain, pooled):
        exchange("pipecomm", tensor)
        assert torch.equal(tensor, expected)
    return {
        "pool": lambda: exchange("pipecomm", pooled),
        "ring": lambda: exchange("pipecomm", plain),
        "gloo": lambda: exchange("gloo", plain),
        "limit": lambda: copy_there_and_back(limit, nbytes, repeats),
    }


def with_cpu_time(calls: Calls, cpu_s: dict[str, list[float]]) -> Calls:
    """The calls; each notes the CPU time of all threads of this process."""

    def timed(name: str) -> None:
        start = time.process_time()
        calls[name]()
        cpu_s.setdefault(name, []).append(time.process_time() - start)

    return {name: lambda name=name: timed(name) for name in calls}  # type: ignore[misc]


def row_of(
    nbytes: int, repeats: int, timings: dict[str, Timing], cpu_s: dict[str, list[float]]
) -> dict[str, Any]:
    one_way_us = {name: 1e6 * timing.median_s / repeats / 2 for name, timing in timings.items()}
    ours_us = one_way_us["pool"]
    names = ("pool", "ring", "gloo")
    cpu = torch.tensor([statistics.median(cpu_s[name]) for name in names])
    dist.all_reduce(cpu)  # of both ranks
    num_gib = 2 * repeats * nbytes / (1 << 30)
    row = {
        "case": "one way",
        "nbytes": nbytes,
        "median_us": ours_us,
        "GB/s": nbytes / ours_us / 1e3,
    }
    for name in ("ring", "gloo", "limit"):
        row |= {f"{name}_us": one_way_us[name], f"{name}_ratio": one_way_us[name] / ours_us}
    for name, seconds in zip(names, cpu.tolist(), strict=True):
        row[f"{name}_cpu_s/GiB"] = seconds / num_gib
    return row


def run(
    rank: int, store_path: str, ring: torch.Tensor, steps: torch.Tensor, options: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store_path, 2))
    cores = sorted(os.sched_getaffinity(0))
    limit = CopyLimit(rank, ring, steps)
    rows = []
    for nbytes, repeats in CASES:
        calls = calls_of(rank, nbytes, repeats, limit)
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        cpu_s: dict[str, list[float]] = {}
        timings = measure(with_cpu_time(calls, cpu_s), options.rounds)
        os.sched_setaffinity(0, cores)
        rows.append(row_of(nbytes, repeats, timings, cpu_s))
    if rank == 0:
        title = "Tensors in pool memory between two ranks of one host; CPU time of both ranks"
        report("p2p_pool", rows, title=title, save=options.json)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    steps = torch.zeros(2, dtype=torch.int64).share_memory_()
    memory = torch.randn(2 * CASES[-1][0] // 4).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), memory, steps, options), nprocs=2)


if __name__ == "__main__":
    main()
