"""What do pooled tensors and blocks cost, what do varying lengths strand, and does a step gain?"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import add_options, measure, report
from torch import nn

from pipecomm import Pipeline
from pipecomm._native import core
from pipecomm.memory.pool import MemoryPool
from pipecomm.replay import Trace, compare

CALLS = 1000
ACTIVATION_NBYTES = 16 << 20


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


def overhead_of_empty(nbytes: int, rounds: int) -> dict[str, Any]:
    """Allocate and free alone: what the pool's way adds to torch's."""
    pool = MemoryPool()

    def pooled() -> None:
        for _ in range(CALLS):
            pool.empty((nbytes,), torch.uint8)

    def plain() -> None:
        for _ in range(CALLS):
            torch.empty((nbytes,), dtype=torch.uint8)

    pooled()
    assert pool.stats().live_nbytes == 0
    assert pool.stats().num_allocations == CALLS
    timings = measure({"pool": pooled, "torch": plain}, rounds)
    return {
        "case": f"allocate, free {nbytes} bytes",
        "pool": timings["pool"].median_s / CALLS * 1e6,
        "baseline": timings["torch"].median_s / CALLS * 1e6,
        "unit": "us",
        "ratio": timings["torch"].median_s / timings["pool"].median_s,
    }


def blocks(num_threads: int, rounds: int) -> dict[str, Any]:
    """Allocate and free of 4 KiB in C++, CPU time of a thread; the baseline is one thread alone."""
    pool = core.make_host_pool(0)
    count = 200_000
    ns: list[float] = []

    def churn() -> None:
        start = time.thread_time()
        pool.churn(4096, count)
        ns.append((time.thread_time() - start) / count * 1e9)

    def all_at_once(threads_now: int) -> float:
        ns.clear()
        threads = [threading.Thread(target=churn) for _ in range(threads_now)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statistics.median(ns)

    alone, together = [], []
    for _ in range(max(3, rounds // 3)):
        alone.append(all_at_once(1))
        together.append(all_at_once(num_threads))
    assert pool.stats()["live_nbytes"] == 0
    ours, baseline = statistics.median(together), statistics.median(alone)
    return {
        "case": f"C++ allocate, free 4 KiB, {num_threads} threads",
        "pool": ours,
        "baseline": baseline,
        "unit": "ns",
        "ratio": baseline / ours,
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


def random_trace(num_events: int) -> Trace:
    """Sizes of 4 KB to 2.7 MB freed out of order, 52 % allocations, up to 200 MB live."""
    choose = random.Random(0)
    ids, nbytes = np.empty(num_events, np.int64), np.empty(num_events, np.int64)
    live: list[tuple[int, int]] = []
    total = 0
    for event in range(num_events):
        size = choose.randint(4_000, 2_700_000)
        if not live or (choose.random() < 0.52 and total + size <= 200_000_000):
            live.append((event, size))
            ids[event], nbytes[event] = event, size
            total += size
        else:
            place = choose.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            ids[event], freed = live.pop()
            nbytes[event] = -1
            total -= freed
    return Trace(ids, nbytes, np.zeros(num_events, np.int64))


def replay(num_events: int, rounds: int) -> dict[str, Any]:
    """CPU time of one trace of random events: our pool's walk, and those of all policies."""
    trace = random_trace(num_events)
    assert compare(trace).ratio("pipecomm") <= 1.05

    def cpu_s(policies: list[str] | None) -> float:
        start = time.process_time()
        compare(trace, policies)
        return time.process_time() - start

    ours, everyone = [], []
    for _ in range(max(2, min(rounds, 5))):
        ours.append(cpu_s(["pipecomm"]))
        everyone.append(cpu_s(None))
    own_s, all_s = statistics.median(ours), statistics.median(everyone)
    return {
        "case": f"replay of {num_events} events, CPU time; baseline: 4 policies",
        "pool": own_s,
        "baseline": all_s,
        "unit": "s",
        "ratio": all_s / own_s,
    }


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1024,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.weight)


def run_steps(rank: int, store: str, rounds: int, found: SimpleQueue[Any]) -> None:
    """Two stages of little arithmetic, with activations of 16 MiB, inside and outside a pool."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    pool = MemoryPool()
    pipeline = Pipeline(
        Scaled(), num_microbatches=4, pool=pool, loss_fn=lambda y, _: y.square().mean()
    )
    rows = 4 * ACTIVATION_NBYTES // 4 // 1024
    x = torch.rand(rows, 1024, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(rows, 1)
    losses: dict[str, Any] = {}
    cpu_s: dict[str, list[float]] = {"pool": [], "torch": []}

    def step(name: str) -> None:
        start = time.process_time()
        with pool.use() if name == "pool" else contextlib.nullcontext():
            result = pipeline.train_step(x if rank == 0 else None, target if rank == 1 else None)
        losses[name] = result.loss
        cpu_s[name].append(time.process_time() - start)

    timings = measure({name: lambda name=name: step(name) for name in cpu_s}, rounds, warmup=2)  # type: ignore[misc]
    assert losses["pool"] == losses["torch"]
    cpu = torch.tensor([statistics.median(cpu_s[name][2:]) for name in ("pool", "torch")])
    dist.all_reduce(cpu)  # of both ranks
    if rank == 0:
        found.put((timings["pool"].median_s, timings["torch"].median_s, *cpu.tolist()))
    pipeline.close()
    dist.destroy_process_group()


def two_stages(rounds: int) -> list[dict[str, Any]]:
    found: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_steps, (str(Path(folder) / "store"), rounds, found), nprocs=2)
    pool_s, torch_s, pool_cpu_s, torch_cpu_s = found.get()
    num_gb = 2 * 4 * ACTIVATION_NBYTES / 1e9  # activations and their gradients
    return [
        {
            "case": "step of 2 stages, 16 MiB activations, in pool.use()",
            "pool": pool_s * 1e3,
            "baseline": torch_s * 1e3,
            "unit": "ms",
            "ratio": torch_s / pool_s,
        },
        {
            "case": "the same: CPU time of both ranks for each GB sent",
            "pool": pool_cpu_s / num_gb,
            "baseline": torch_cpu_s / num_gb,
            "unit": "s/GB",
            "ratio": torch_cpu_s / pool_cpu_s,
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the length trace")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the replay")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [overhead_of_empty(1 << power, options.rounds) for power in (10, 16, 20)]
    rows += [compare_latency(1 << power, options.rounds) for power in (10, 16, 20, 24, 26)]
    rows += [blocks(num_threads, options.rounds) for num_threads in (2, 4)]
    rows.append(varying_lengths(options.steps))
    rows.append(replay(options.events, options.rounds))
    rows += two_stages(options.rounds)
    report("pool", rows, title="Pool memory against torch's", save=options.json)


if __name__ == "__main__":
    main()
