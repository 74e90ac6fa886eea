"""How fast do tensors cross between two processes on one GPU (or on two), and what does it cost?

Against a device-to-device copy of the same size, timed in the same run by the receiving process.
The last rows time matrix products that fill the device, alone and with transfers beside them: the
share lost is what the transfers take of its multiprocessors and of its memory's bandwidth.
`--device cpu` rehearses on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Timing, add_options, report

from pipecomm import BackendOptions, Codec

CODECS = ("raw", "int8", "int4")


class Rank:
    """One of the two processes: its device, its clock, its peer."""

    def __init__(self, rank: int, store_path: str, device: str) -> None:
        self.rank = rank
        self.peer = 1 - rank
        self.is_cuda = device == "cuda"
        index = rank % torch.cuda.device_count() if self.is_cuda else 0
        self.device = torch.device("cuda", index) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        self.store_path = store_path

    def connect(self, codec: str) -> None:
        store = dist.FileStore(f"{self.store_path}.{codec}", 2)
        dist.init_process_group(
            "pipecomm",
            rank=self.rank,
            world_size=2,
            store=store,
            timeout=timedelta(seconds=60),
            pg_options=BackendOptions(codec=codec, grad_codec=codec),
        )

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object], rounds: int, warmup: int = 3) -> list[float]:
        samples = []
        for index in range(-warmup, max(rounds, 2)):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            if index >= 0:
                samples.append(time.perf_counter() - start)
        return samples

    def alone(self, call: Callable[[], object], rounds: int) -> list[float]:
        """Timed on rank 0, which prints, while the other rank does nothing."""
        return self.timed(call, rounds) if self.rank == 0 else [1.0, 1.0]

    def pass_on(self, sent: torch.Tensor, got: torch.Tensor, times: int) -> None:
        """Rank 0 sends `times` messages one after the other; rank 1 answers the last."""
        works = []
        for _ in range(times):
            works.append(dist.irecv(got, 0) if self.rank else dist.isend(sent, 1))
        for work in works:
            work.wait()
        self.synchronize()
        token = got[:1] if self.rank else torch.empty_like(got[:1])
        (dist.isend(token, 0) if self.rank else dist.irecv(token, 1)).wait()
        self.synchronize()

    def ping_pong(self, sent: torch.Tensor, got: torch.Tensor) -> None:
        """There and back; each side waits on its device before it answers."""
        if self.rank == 0:
            dist.isend(sent, 1).wait()
            dist.irecv(got, 1).wait()
            self.synchronize()
        else:
            dist.irecv(got, 0).wait()
            self.synchronize()
            dist.isend(sent, 0).wait()


def run(rank: int, store_path: str, device: str, mib: int, rounds: int, results: Any) -> None:
    me = Rank(rank, store_path, device)
    rows: list[dict[str, Any]] = []
    numel = (mib << 20) // 2
    for codec in CODECS:
        me.connect(codec)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(numel // 1024, 1024, generator=generator)
        sent = values.to(torch.bfloat16).to(me.device)
        got = torch.empty_like(sent)
        check(me, codec, sent, got)
        rows += bandwidth(me, codec, sent, got, rounds)
        if codec == "raw":
            rows += latency(me, rounds)
            rows += beside_compute(me, sent, got, rounds)
        dist.destroy_process_group()
    if rank == 0:
        results.put(rows)


def check(me: Rank, codec: str, sent: torch.Tensor, got: torch.Tensor) -> None:
    """`sent` is the same on both ranks; a codec gives the host codec's values."""
    me.pass_on(sent, got, 1)
    if me.rank == 0:
        return
    expected = sent[:64].cpu()
    if codec != "raw":
        host = Codec(codec)
        expected = host.decode(host.encode(expected), torch.empty_like(expected))
    assert torch.equal(got[:64].cpu(), expected), codec


def bandwidth(
    me: Rank, codec: str, sent: torch.Tensor, got: torch.Tensor, rounds: int
) -> list[dict[str, Any]]:
    times = 8
    samples = [s / times for s in me.timed(lambda: me.pass_on(sent, got, times), rounds)]
    copies = me.alone(lambda: [got.copy_(sent) for _ in range(times)], rounds)
    copies = [s / times for s in copies]
    name = f"{codec} {sent.nbytes >> 20} MiB bfloat16"
    return [row(name, sent.nbytes, samples, copies, "copy")]


def latency(me: Rank, rounds: int) -> list[dict[str, Any]]:
    sent = torch.ones(1024, device=me.device)
    got = torch.empty_like(sent)
    samples = [s / 2 for s in me.timed(lambda: me.ping_pong(sent, got), rounds * 20, warmup=50)]
    me.pass_on(sent, got, 1)
    copies = me.alone(lambda: got.copy_(sent), rounds * 20)
    return [row("one way 4 KiB", sent.nbytes, samples, copies, "copy")]


def beside_compute(
    me: Rank, sent: torch.Tensor, got: torch.Tensor, rounds: int
) -> list[dict[str, Any]]:
    """Matrix products on rank 0 while messages go from it and come to it."""
    width = 8192 if me.is_cuda else 512
    x = torch.randn(width, width, device=me.device).to(torch.bfloat16)
    num_products = 20

    def products() -> None:
        for _ in range(num_products):
            torch.mm(x, x)

    def products_and_transfers() -> None:
        works = [dist.isend(sent, me.peer), dist.irecv(got, me.peer)]
        if me.rank == 0:
            products()
        for work in works:
            work.wait()

    beside = me.timed(products_and_transfers, rounds)
    me.pass_on(sent, got, 1)
    alone = me.alone(products, rounds)
    name = f"{num_products} products beside {sent.nbytes >> 20} MiB both ways"
    return [row(name, 2 * sent.nbytes, beside, alone, "alone")]


def row(
    name: str, nbytes: int, samples: list[float], baseline: list[float], what: str
) -> dict[str, Any]:
    timing = Timing.of(samples)
    base_s = statistics.median(baseline)
    return {
        "case": name,
        "payload bytes": nbytes,
        "median us": timing.median_s * 1e6,
        "p90 us": timing.p90_s * 1e6,
        "GB/s": nbytes / timing.median_s / 1e9,
        "baseline": what,
        "baseline us": base_s * 1e6,
        "baseline / median": base_s / timing.median_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the large tensor in MiB")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    add_options(parser)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(3, "p2p_cuda.py: expected a GPU; torch finds none here\n")
    if options.device == "cpu":
        os.environ["PIPECOMM_STAND_IN_DEVICE"] = "1"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.device, options.mib, options.rounds, results)
        ranks = mp.spawn(run, arguments, nprocs=2, join=False)
        while not ranks.join():  # raises what a rank raised
            pass
        rows = results.get()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the host as a device"
    report("p2p_cuda", rows, title=f"Two processes on {where}", save=options.json)


if __name__ == "__main__":
    main()
