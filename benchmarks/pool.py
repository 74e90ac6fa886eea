"""What does a pooled tensor cost against a fresh one, and what do varying lengths strand?"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipecomm._native import core
from pipecomm.memory import MemoryPool

RESULTS = Path(__file__).parent / "results" / "pool.jsonl"


def time_us(fn: Callable[[], torch.Tensor]) -> float:
    """One allocation, one write of every byte, one free, in microseconds."""
    start = time.perf_counter()
    fn().fill_(1)
    return (time.perf_counter() - start) * 1e6


def compare_latency(nbytes: int, rounds: int) -> dict[str, Any]:
    """Pool against torch.empty, interleaved."""
    pool = MemoryPool()
    assert int(pool.empty((nbytes,), torch.uint8).fill_(1).sum()) == nbytes
    calls = pool.stats().num_upstream_calls
    pooled, fresh = [], []
    for _ in range(rounds):
        pooled.append(time_us(lambda: pool.empty((nbytes,), torch.uint8)))
        fresh.append(time_us(lambda: torch.empty(nbytes, dtype=torch.uint8)))
    assert pool.stats().num_upstream_calls == calls, "the pool went upstream after the first step"
    row: dict[str, Any] = {"case": "allocate, fill, free", "nbytes": nbytes}
    for name, values in (("pool", pooled), ("torch", fresh)):
        row[f"{name}_median_us"] = round(statistics.median(values), 2)
        row[f"{name}_p90_us"] = round(statistics.quantiles(values, n=10)[-1], 2)
    row["ratio"] = round(row["torch_median_us"] / row["pool_median_us"], 2)
    return row


def varying_lengths(steps: int) -> dict[str, Any]:
    """24 layers of 3 tensors of a length that changes each step, freed in reverse.

    The baseline is a cache that rounds to powers of two and never splits, as torch does for
    pinned memory.
    """
    pool = core.make_lazy_pool()
    lengths = random.Random(0)
    cached: Counter[int] = Counter()
    for _ in range(steps):
        nbytes = lengths.randint(128, 4096) * 1024 * 2
        blocks = [pool.allocate(nbytes) for _ in range(72)]
        while blocks:
            blocks.pop()
        rounded = 1 << (nbytes - 1).bit_length()
        cached[rounded] = 72
    pool.check()
    stats = pool.stats()
    baseline = sum(size * count for size, count in cached.items())
    return {
        "case": f"varying lengths, {steps} steps",
        "peak_live_mib": stats["peak_live_nbytes"] >> 20,
        "peak_reserved_mib": stats["peak_reserved_nbytes"] >> 20,
        "reserved_over_live": round(stats["peak_reserved_nbytes"] / stats["peak_live_nbytes"], 3),
        "power_of_two_over_live": round(baseline / stats["peak_live_nbytes"], 3),
        "upstream_calls": stats["num_upstream_calls"],
    }


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=RESULTS.parent.parent,
    ).stdout.strip()
    return {"machine": platform.machine(), "commit": commit, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="timings of each case")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the length trace")
    parser.add_argument("--save", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare_latency(1 << power, options.rounds) for power in (10, 16, 20, 24, 26)]
    rows.append(varying_lengths(options.steps))
    for row in rows:
        print(" | ".join(f"{name} {value}" for name, value in row.items()))
    if options.save:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row | machine()) + "\n" for row in rows)


if __name__ == "__main__":
    main()
