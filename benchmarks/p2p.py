"""How long does a tensor take from rank to rank on one host, beside gloo and the path's limit?

The thread of each rank that sends and receives is bound to a core of its own, whichever backend it
calls; their other threads run where they like. `--free` leaves that thread to the scheduler too,
which on few cores may keep both ranks on one core for a while.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Timing, add_options, measure, report

import pipecomm  # noqa: F401 - registers the backend

# Payload bytes, and exchanges in one timing (short ones are repeated to be measurable).
QUICK_CASES = ((4, 50), (4 << 10, 50), (64 << 10, 20), (1 << 20, 5), (16 << 20, 1), (64 << 20, 1))
FULL_CASES = (*QUICK_CASES[:3], (256 << 10, 20), *QUICK_CASES[3:4], (4 << 20, 2), *QUICK_CASES[4:])
QUICK_ROUNDS, FULL_ROUNDS = 15, 60
BACKENDS = ("gloo", "pipecomm")
RING_NBYTES = 4 << 20  # what a channel's ring holds
PIECE_NBYTES = 256 << 10  # large enough that a call costs nothing beside its copy

Calls = dict[str, Callable[[], None]]


class CopyLimit:
    """What the way through shared memory costs at least: a copy in and a copy out, at one time.

    Rank 0 copies into a shared buffer of the ring's size while rank 1 copies out of it, half a
    buffer behind and without waiting for the bytes. Both start and end together.
    """

    def __init__(self, rank: int, ring: torch.Tensor, steps: torch.Tensor) -> None:
        self.rank, self.ring, self.steps = rank, ring, steps

    def copies(self, tensor: torch.Tensor, repeats: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) for every copy of this rank; made before anything is timed."""
        pieces = tensor.split(PIECE_NBYTES // 4) * repeats
        slots = self.ring.split(min(PIECE_NBYTES // 4, len(tensor)))
        if self.rank == 0:
            return [(slot, piece) for piece, slot in zip(pieces, itertools.cycle(slots))]
        slots = slots[len(slots) // 2 :] + slots[: len(slots) // 2]
        return [(piece, slot) for piece, slot in zip(pieces, itertools.cycle(slots))]

    def meet(self) -> None:
        self.steps[self.rank] += 1
        while self.steps[1 - self.rank] < self.steps[self.rank]:
            pass

    def run(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.meet()
        for target, source in copies:
            target.copy_(source)
        self.meet()


def there_and_back(rank: int, tensor: torch.Tensor, group: dist.ProcessGroup, repeats: int) -> None:
    """Rank 0 sends, rank 1 receives and sends back: twice the one-way time."""
    for _ in range(repeats):
        if rank == 0:
            dist.send(tensor, 1, group)
            dist.recv(tensor, 1, group)
        else:
            dist.recv(tensor, 0, group)
            dist.send(tensor, 0, group)


def check_arrival(rank: int, nbytes: int, group: dist.ProcessGroup) -> None:
    expected = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1))
    tensor = expected.clone() if rank == 0 else torch.zeros_like(expected)
    there_and_back(rank, tensor, group, 1)
    assert torch.equal(tensor, expected)


def calls_of(
    rank: int, nbytes: int, repeats: int, groups: dict[str, dist.ProcessGroup], limit: CopyLimit
) -> Calls:
    tensor = torch.randn(nbytes // 4)
    calls: Calls = {
        name: lambda group=group: there_and_back(rank, tensor, group, repeats)  # type: ignore[misc]
        for name, group in groups.items()
    }
    copies = limit.copies(tensor, 2 * repeats)
    calls["limit"] = lambda: limit.run(copies)
    return calls


def row_of(nbytes: int, repeats: int, timings: dict[str, Timing]) -> dict[str, Any]:
    to_one_way_us = 1e6 / repeats / 2
    ours = timings["pipecomm"]
    median_us = ours.median_s * to_one_way_us
    gloo_us = timings["gloo"].median_s * to_one_way_us
    limit_us = timings["limit"].p10_s * to_one_way_us  # a limit is what nothing disturbs
    return {
        "case": "one way",
        "nbytes": nbytes,
        "median_us": median_us,
        "p10_us": ours.p10_s * to_one_way_us,
        "p90_us": ours.p90_s * to_one_way_us,
        "GB/s": nbytes / median_us / 1e3,
        "gloo_us": gloo_us,
        "gloo_ratio": gloo_us / median_us,
        "limit_us": limit_us,
        "limit_ratio": limit_us / median_us,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One-way times by size; how many times faster than gloo, how near the limit they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [row["nbytes"] for row in rows]
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4))
    for label, key in (("gloo", "gloo_us"), ("pipecomm", "median_us"), ("two copies", "limit_us")):
        times.loglog(sizes, [row[key] for row in rows], "o-", label=label)
    times.fill_between(
        sizes, [row["p10_us"] for row in rows], [row["p90_us"] for row in rows], alpha=0.2
    )
    times.set_ylabel("one way, us (band: 10 to 90 %)")
    ratios.semilogx(sizes, [row["gloo_ratio"] for row in rows], "o-", label="gloo / pipecomm")
    ratios.semilogx(
        sizes, [row["limit_ratio"] for row in rows], "o-", label="two copies / pipecomm"
    )
    ratios.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (times, ratios):
        axes.set_xlabel("bytes")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def estimate_s(cases: list[tuple[int, int, Calls]], num_rounds: int) -> float:
    """Every call once, timed: the whole takes about as many times longer as there are rounds."""
    start = time.perf_counter()
    for _, _, calls in cases:
        for call in calls.values():
            call()
    return (time.perf_counter() - start) * num_rounds


def run(
    rank: int, store_path: str, ring: torch.Tensor, steps: torch.Tensor, options: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store_path, 2))
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    limit = CopyLimit(rank, ring, steps)
    sizes = QUICK_CASES if options.quick else FULL_CASES
    for nbytes, _ in sizes:
        for group in groups.values():
            check_arrival(rank, nbytes, group)
    if not options.free:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    cases = [(size, times, calls_of(rank, size, times, groups, limit)) for size, times in sizes]
    num_rounds = options.rounds or (QUICK_ROUNDS if options.quick else FULL_ROUNDS)
    if not options.quick:
        seconds = estimate_s(cases, num_rounds + options.warmup)
        if rank == 0:
            print(f"{len(cases)} sizes, {num_rounds} rounds: about {seconds:.0f} s", flush=True)
    rows = [
        row_of(size, times, measure(calls, num_rounds, options.warmup))
        for size, times, calls in cases
    ]
    if rank == 0:
        report("p2p", rows, title="CPU tensors between two ranks of one host", save=options.json)
        if options.plot:
            plot(rows, options.plot)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.set_defaults(rounds=None)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--free", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: some seconds")
    parser.add_argument(
        "--plot", type=Path, help="draw times and ratios into this file (matplotlib)"
    )
    options = parser.parse_args()
    ring = torch.zeros(RING_NBYTES // 4).share_memory_()
    steps = torch.zeros(2, dtype=torch.int64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), ring, steps, options), nprocs=2)


if __name__ == "__main__":
    main()
