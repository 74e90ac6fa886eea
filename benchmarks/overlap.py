"""What does a rank that computes lose while large messages come and go?"""

from __future__ import annotations

import argparse
import math
import statistics
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

NBYTES = 16 << 20
BACKENDS = ("gloo", "pipecomm")
SIDE = 384
COMPUTE_S = 0.04  # of a step: a few times what its messages take


class Step:
    """One message each way beside the matrix products of rank 0; rank 1 only answers."""

    def __init__(self, rank: int, group: dist.ProcessGroup, num_products: int) -> None:
        self.rank, self.group, self.num_products = rank, group, num_products
        self.outgoing = torch.full((NBYTES // 4,), float(rank))
        self.incoming = torch.empty_like(self.outgoing)
        self.matrix = torch.randn(SIDE, SIDE)
        self.others_cpu_s: list[float] = []

    def exchange(self, beside: Callable[[], None] = lambda: None) -> None:
        peer = 1 - self.rank
        works = [
            dist.irecv(self.incoming, peer, self.group),
            dist.isend(self.outgoing, peer, self.group),
        ]
        beside()
        for work in works:
            work.wait()

    def compute(self) -> None:
        if self.rank == 0:
            for _ in range(self.num_products):
                torch.mm(self.matrix, self.matrix)

    def both(self) -> None:
        start_s = time.process_time() - time.thread_time()
        self.exchange(self.compute)
        self.others_cpu_s.append(time.process_time() - time.thread_time() - start_s)

    def check(self) -> None:
        self.incoming.zero_()
        self.exchange()
        assert torch.equal(self.incoming, torch.full_like(self.incoming, float(1 - self.rank)))

    def copies_cpu_s(self) -> float:
        """CPU time that threads other than the computing one used in a step, median."""
        return statistics.median(self.others_cpu_s)


def products_in(seconds: float) -> int:
    """Matrix products that take this long where nothing disturbs them."""
    matrix = torch.randn(SIDE, SIDE)
    best_s = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(5):
            torch.mm(matrix, matrix)
        best_s = min(best_s, (time.perf_counter() - start) / 5)
    return max(1, round(seconds / best_s))


def row_of(name: str, timings: dict[str, Timing], copies_cpu_s: float) -> dict[str, Any]:
    compute_s = timings["compute"].median_s
    exchange_s = timings[f"exchange {name}"].median_s
    both_s = timings[f"both {name}"].median_s
    hidden_s = compute_s + exchange_s - both_s
    return {
        "case": name,
        "nbytes": NBYTES,
        "compute_ms": compute_s * 1e3,
        "exchange_ms": exchange_s * 1e3,
        "both_ms": both_s * 1e3,
        "both_p90_ms": timings[f"both {name}"].p90_s * 1e3,
        "overlap_%": min(max(hidden_s / min(compute_s, exchange_s), 0.0), 1.0) * 100,
        "copies_cpu_ms": copies_cpu_s * 1e3,
        "loss_%": (both_s - compute_s - copies_cpu_s) / compute_s * 100,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2 + len(rows)))
    for place, row in enumerate(rows):
        bars = (("both_ms", "C2"), ("exchange_ms", "C1"), ("compute_ms", "C0"))
        for index, (key, colour) in enumerate(bars):
            label = key.removesuffix("_ms") if place == 0 else None
            axes.barh(place + index * 0.27, row[key], height=0.25, color=colour, label=label)
    axes.set_yticks([place + 0.27 for place in range(len(rows))], [row["case"] for row in rows])
    axes.set_xlabel("ms")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def run(rank: int, store_path: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store_path, 2))
    num_products = products_in(COMPUTE_S)
    steps = {name: Step(rank, dist.new_group(backend=name), num_products) for name in BACKENDS}
    calls: dict[str, Callable[[], None]] = {"compute": steps["pipecomm"].compute}
    for name, step in steps.items():
        step.check()
        calls[f"exchange {name}"] = step.exchange
        calls[f"both {name}"] = step.both
    timings = measure(calls, options.rounds, options.warmup)
    if rank == 0:
        rows = [row_of(name, timings, step.copies_cpu_s()) for name, step in steps.items()]
        report(
            "overlap", rows, title="Matrix products beside one message each way", save=options.json
        )
        if options.plot:
            plot(rows, options.plot)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--plot", type=Path, help="write the bars to this file (matplotlib)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
