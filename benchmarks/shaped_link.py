"""What does a training step take over a slow network, by codec, beside torch over gloo?

Two hosts are two network namespaces with a shaped link between them (needs root). A stage takes
half as long, forward and backward each, as its activations take to cross raw; it sleeps for that
time, so that the processors are free for what is measured. The prediction is the schedule's
simulation with the bytes of each codec at the link's rate, and with what forward and backward of
each stage, the last one with the loss, take by themselves on a microbatch in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import Timing, add_options, measure, report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipecomm
from pipecomm.schedule import Costs, build

# The hosts of the tests are those of this benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.hosts.network import Hosts, why_impossible

SIZE, NUM_MICROBATCHES, WIDTH = 2, 8, 1024
SCHEDULE = "eager-1f1b"
# Rows of a microbatch by the link's rate: some 40 ms of raw transfer.
RATES = {"200mbit": (200e6, 240), "1gbit": (1e9, 1200)}
# Timings of a stage by itself.
NUM_ALONE = 15
# Of an Ethernet frame of 1514 bytes TCP carries 1448.
PAYLOAD_SHARE = 1448 / 1514
CODECS = ("raw", "int8", "int4")

Step = Callable[[], object]


class Slow(torch.autograd.Function):
    """Takes `seconds` in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.compute_s = compute_s
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x * self.gain, self.compute_s)


class Case:
    """The same step in all its forms, on one rank."""

    def __init__(self, rank: int, rate: str) -> None:
        bits_per_s, num_rows = RATES[rate]
        self.rank = rank
        self.bytes_per_s = bits_per_s / 8 * PAYLOAD_SHARE
        self.raw_s = num_rows * WIDTH * 4 / self.bytes_per_s
        self.shape = (num_rows, WIDTH)
        generator = torch.Generator().manual_seed(9)
        rows = (NUM_MICROBATCHES * num_rows, WIDTH)
        self.inputs, self.targets = (torch.randn(rows, generator=generator) for _ in range(2))
        self.compute_s: list[tuple[float, float]] = [(0.0, 0.0)] * SIZE
        dist.all_gather_object(self.compute_s, self.alone_s())

    def alone_s(self) -> tuple[float, float]:
        """Seconds of forward and backward of this rank's stage on one microbatch, undisturbed."""
        stage = self.stage()
        times: list[tuple[float, float]] = []
        for _ in range(NUM_ALONE):
            x = self.inputs[: self.shape[0]].clone().requires_grad_(self.rank > 0)
            start = time.perf_counter()
            output = stage(x)
            if self.rank == SIZE - 1:
                output = nn.functional.mse_loss(output, self.targets[: self.shape[0]])
            half = time.perf_counter()
            output.backward(torch.ones_like(output))
            times.append((half - start, time.perf_counter() - half))
        return min(t[0] for t in times), min(t[1] for t in times)

    def stage(self) -> Stage:
        return Stage(self.raw_s / 2)

    def over_torch(self, group: dist.ProcessGroup) -> Step:
        stage = PipelineStage(self.stage(), self.rank, SIZE, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
        if self.rank == 0:
            return lambda: schedule.step(self.inputs)
        return lambda: schedule.step(target=self.targets)

    def over_pipecomm(self, codec: str) -> Step:
        pipeline = pipecomm.Pipeline(
            self.stage(),
            schedule=SCHEDULE,
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=nn.functional.mse_loss,
            codec=codec,
            grad_codec=codec,
        )
        check_loss(pipeline.train_step(self.inputs, self.targets).loss, codec)
        return lambda: pipeline.train_step(self.inputs, self.targets)

    def wire_nbytes(self, codec: str) -> int:
        return pipecomm.Codec(codec).wire_nbytes(self.shape, torch.float32)

    def predicted_s(self, codec: str) -> float:
        """What the byte count allows: nothing waits but for bytes that are on their way."""
        transfer_s = self.wire_nbytes(codec) / self.bytes_per_s
        forward_s, backward_s = zip(*self.compute_s, strict=True)
        costs = Costs(forward_s, backward_s, transfer_s, transfer_s)
        return build(SCHEDULE, SIZE, NUM_MICROBATCHES).simulate(costs).step_s


def check_loss(loss: float | None, codec: str) -> None:
    # Two batches of normal values differ by 2 in the mean square.
    assert loss is None or abs(loss - 2) < 0.05, (codec, loss)


def row_of(rate: str, codec: str, case: Case, timing: Timing, gloo: Timing) -> dict[str, Any]:
    predicted_s = case.predicted_s(codec)
    return {
        "case": f"{rate} {codec}",
        "payload_nbytes": case.shape[0] * WIDTH * 4,
        "wire_nbytes": case.wire_nbytes(codec),
        "step_ms": timing.median_s * 1e3,
        "p90_ms": timing.p90_s * 1e3,
        "predicted_ms": predicted_s * 1e3,
        "predicted_ratio": predicted_s / timing.median_s,
        "gloo_ms": gloo.median_s * 1e3,
        "gloo_ratio": gloo.median_s / timing.median_s,
    }


def run(rank: int, size: int, _: str, address: str, rate: str, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29500, size, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    case = Case(rank, rate)
    steps = {codec: case.over_pipecomm(codec) for codec in CODECS}
    steps["gloo"] = case.over_torch(dist.group.WORLD)
    timings = measure(steps, rounds)
    dist.destroy_process_group()
    return [row_of(rate, codec, case, timings[codec], timings["gloo"]) for codec in CODECS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    add_options(parser)
    options = parser.parse_args()
    if why := why_impossible():
        parser.exit(3, f"shaped_link.py: expected to make network namespaces; {why}\n")
    rows: list[dict[str, Any]] = []
    with Hosts(SIZE) as hosts:
        for rate in options.rates:
            for host in range(SIZE):
                hosts.shape(host, rate)
            arguments = (hosts.address(0), rate, options.rounds)
            env = {"GLOO_SOCKET_IFNAME": "eth0"}
            rows += hosts.spawn(range(SIZE), run, *arguments, timeout_s=600, env=env)[-1]
    title = f"Training step over a shaped link, {SCHEDULE}, {NUM_MICROBATCHES} microbatches"
    report("shaped_link", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
