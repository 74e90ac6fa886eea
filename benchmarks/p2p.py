"""How long does a tensor take from rank to rank on one host, beside gloo and a memory copy?"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Timing, add_options, measure, report

import pipecomm  # noqa: F401 - registers the backend

# Payload bytes, and exchanges in one timing (short ones are repeated to be measurable).
CASES = ((4 << 10, 50), (64 << 10, 20), (1 << 20, 5), (16 << 20, 1), (64 << 20, 1))
BACKENDS = ("gloo", "pipecomm")


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


def time_case(
    rank: int, nbytes: int, repeats: int, groups: dict[str, dist.ProcessGroup], rounds: int
) -> dict[str, Timing]:
    tensor, other = torch.randn(nbytes // 4), torch.randn(nbytes // 4)
    calls: dict[str, Any] = {
        name: lambda group=group: there_and_back(rank, tensor, group, repeats)
        for name, group in groups.items()
    }

    def copy() -> None:
        for _ in range(repeats):
            other.copy_(tensor)

    calls["memcpy"] = copy
    return measure(calls, rounds)


def row_of(nbytes: int, repeats: int, timings: dict[str, Timing]) -> dict[str, Any]:
    one_way_us = {name: timings[name].median_s / repeats / 2 * 1e6 for name in BACKENDS}
    copy_us = timings["memcpy"].median_s / repeats * 1e6
    return {
        "case": "send one way",
        "nbytes": nbytes,
        "median_us": one_way_us["pipecomm"],
        "p90_us": timings["pipecomm"].p90_s / repeats / 2 * 1e6,
        "GB/s": nbytes / one_way_us["pipecomm"] / 1e3,
        "gloo_us": one_way_us["gloo"],
        "gloo_ratio": one_way_us["gloo"] / one_way_us["pipecomm"],
        "memcpy_us": copy_us,
        "memcpy_ratio": copy_us / one_way_us["pipecomm"],
    }


def run(rank: int, store_path: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store_path, 2))
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows = []
    for nbytes, repeats in CASES:
        for group in groups.values():
            check_arrival(rank, nbytes, group)
        rows.append(
            row_of(nbytes, repeats, time_case(rank, nbytes, repeats, groups, options.rounds))
        )
    if rank == 0:
        report("p2p", rows, title="CPU tensors between two ranks of one host", save=options.json)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
