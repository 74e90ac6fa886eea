"""What does a step of torch's own pipelining take over gloo, over us, and in our engine?"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _harness import Timing, add_options, measure, report
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import pipecomm

WIDTH, ROWS, NUM_MICROBATCHES, SIZE = 1024, 1024, 8, 2
# Name -> torch's class, and stages of a rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}

Step = Callable[[], float | None]


def make_stages(name: str, rank: int) -> dict[int, nn.Module]:
    """Those of a rank, by index; all ranks' stages together are the same whatever the schedule."""
    _, parts = SCHEDULES[name]
    stages: dict[int, nn.Module] = {}
    for index in range(rank, parts * SIZE, SIZE):
        torch.manual_seed(index)
        blocks = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2 // parts)]
        stages[index] = nn.Sequential(*(layer for block in blocks for layer in block))
    return stages


def torch_step(
    name: str, rank: int, group: dist.ProcessGroup, inputs: Tensor, targets: Tensor
) -> Step:
    kind, parts = SCHEDULES[name]
    num_stages = parts * SIZE
    stages = [
        PipelineStage(module, index, num_stages, torch.device("cpu"), group=group)
        for index, module in make_stages(name, rank).items()
    ]
    given = stages if parts > 1 else stages[0]
    schedule = kind(given, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().item() if losses else None

    return step


def engine_step(name: str, rank: int, inputs: Tensor, targets: Tensor) -> Step:
    pipeline = pipecomm.Pipeline(
        list(make_stages(name, rank).values()),
        schedule=name,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    return lambda: pipeline.train_step(inputs, targets).loss


def check_losses(steps: dict[str, Step]) -> None:
    losses = {name: step() for name, step in steps.items()}
    known = [loss for loss in losses.values() if loss is not None]
    assert not known or max(known) - min(known) < 1e-5 * abs(known[0]), losses


def row_of(name: str, timings: dict[str, Timing]) -> dict[str, Any]:
    gloo_s = timings["gloo"].median_s
    return {
        "case": name,
        "payload_nbytes": ROWS * WIDTH * 4,
        "gloo_ms": gloo_s * 1e3,
        "pipecomm_ms": timings["pipecomm"].median_s * 1e3,
        "p90_ms": timings["pipecomm"].p90_s * 1e3,
        "gloo_ratio": gloo_s / timings["pipecomm"].median_s,
        "engine_ms": timings["engine"].median_s * 1e3,
        "engine_ratio": gloo_s / timings["engine"].median_s,
    }


def run(rank: int, store_path: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, store=store)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "pipecomm")}
    generator = torch.Generator().manual_seed(9)
    inputs, targets = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    rows = []
    for name in SCHEDULES:
        steps = {
            backend: torch_step(name, rank, group, inputs, targets)
            for backend, group in groups.items()
        }
        steps["engine"] = engine_step(name, rank, inputs, targets)
        check_losses(steps)
        rows.append(row_of(name, measure(steps, options.rounds)))
    if rank == 0:
        title = "One training step, two stages on one host, no codec"
        report("torch_pipelining", rows, title=title, save=options.json)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), options), nprocs=SIZE)


if __name__ == "__main__":
    main()
