"""What does a pooled tensor cost against a fresh one, and what do varying lengths strand?"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Any

import torch
from _harness import add_options, measure, report

from pipecomm._native import core
from pipecomm.memory.pool import MemoryPool


def compare_latency(nbytes: int, rounds: int) -> dict[str, Any]:
    """One allocation, one write of every byte, one free: pool against torch.empty."""
    pool = MemoryPool()
    assert int(pool.empty((nbytes,), torch.uint8).fill_(1).sum()) == nbytes
    calls = pool.stats().num_upstream_calls
    timings = measure(
        {
            "pool": lambda: pool.empty((nbytes,), torch.uint8).fill_(1),
            "torch": lambda: torch.empty(nbytes, dtype=torch.uint8).fill_(1),
        },
        rounds,
    )
    assert pool.stats().num_upstream_calls == calls, "the pool went upstream after the first step"
    return {
        "case": f"allocate, fill, free {nbytes} bytes",
        "pool": timings["pool"].median_s * 1e6,
        "baseline": timings["torch"].median_s * 1e6,
        "unit": "us",
        "ratio": timings["torch"].median_s / timings["pool"].median_s,
    }


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
    held, live = stats["peak_reserved_nbytes"], stats["peak_live_nbytes"]
    return {
        "case": f"varying lengths, {steps} steps: held over live",
        "pool": held / live,
        "baseline": baseline / live,
        "unit": "",
        "ratio": baseline / held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the length trace")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare_latency(1 << power, options.rounds) for power in (10, 16, 20, 24, 26)]
    rows.append(varying_lengths(options.steps))
    title = "Pool against torch.empty, and against a cache of powers of two"
    report("pool", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
