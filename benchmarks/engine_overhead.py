"""What does the engine take for an action, Python included, where computing takes next to nothing?

Two ranks on this host, messages of 256 bytes: of each action so many microseconds go to the stage
(module, loss, autograd), to waiting for the other rank, and to what lies between two actions.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from _harness import add_options, report
from _ranks import rows_of_ranks
from torch import Tensor, nn

import pipecomm

SIZE, NUM_MICROBATCHES, ROWS, WIDTH = 2, 64, 16, 4
NAMES = ("gpipe", "1f1b")


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def measured(name: str, rank: int, rounds: int) -> dict[str, float]:
    """Microseconds an action, on this rank; medians over the steps."""
    torch.manual_seed(0)
    x, y = torch.rand(2, NUM_MICROBATCHES * ROWS, WIDTH).unbind(0)
    parts: dict[str, list[float]] = {"stage_us": [], "wait_us": [], "between_us": []}
    with pipecomm.Pipeline(
        Gain(), schedule=name, num_microbatches=NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    ) as pipeline:
        # Both stages multiply by one.
        loss = pipeline.train_step(x, y).loss
        assert loss is None or abs(loss - float(nn.functional.mse_loss(x, y))) < 1e-6, loss
        for _ in range(rounds):
            stats = pipeline.train_step(x, y).stats
            num_actions = sum(event.lane == "compute" for event in stats.events)
            between_s = stats.step_s - stats.compute_s - stats.wait_s
            for part, seconds in zip(
                parts, (stats.compute_s, stats.wait_s, between_s), strict=True
            ):
                parts[part].append(seconds / num_actions * 1e6)
    return {part: statistics.median(values) for part, values in parts.items()}


def run(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        found: list[Any] = [None] * SIZE
        dist.all_gather_object(found, measured(name, rank, options.rounds))
        rows += [{"case": f"{name}, rank {peer}", **own} for peer, own in enumerate(found)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    rows = rows_of_ranks(SIZE, run, options)
    title = f"Microseconds an action, {NUM_MICROBATCHES} microbatches"
    report("engine_overhead", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
