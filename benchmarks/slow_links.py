"""How much does a schedule planned for a slow link gain over 1F1B at the same memory?

Stages sleep (see schedules.py); messages of 256 KiB cross links that are emulated, so that every
rank can be on this host. Where 1F1B keeps P microbatches on its first rank, `planned` may keep P on
each; eager-1f1b keeps up to twice as many.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist
from _harness import Timing, add_options, report
from _ranks import rows_of_ranks
from _sleeping import (
    NBYTES,
    Live,
    Times,
    data,
    measure_together,
    stages_of,
    use_fine_timers,
)
from torch import nn

import pipecomm
from pipecomm.schedule import Costs, Schedule, build

NAMES = ("1f1b", "planned", "eager-1f1b")
LINKS = {
    "20 ms": pipecomm.LinkEmulation(latency_ms=20),
    "200 Mbit/s": pipecomm.LinkEmulation(mbps=200),
}
SIZES = ((4, 8), (8, 16))
TIMES = Times(10e-3, 10e-3, 10e-3)


def costs_of(link: pipecomm.LinkEmulation) -> Costs:
    return Costs(
        TIMES.forward_s,
        TIMES.backward_s,
        backward_weight_s=TIMES.weight_s,
        forward_nbytes=NBYTES,
        backward_nbytes=NBYTES,
        link_bytes_per_s=link.mbps * 1e6 / 8 or None,
        latency_s=link.latency_ms / 1e3,
    )


def schedule_of(name: str, num_ranks: int, count: int, costs: Costs) -> Schedule:
    options = {"costs": costs, "max_activations": num_ranks} if name == "planned" else {}
    return build(name, num_ranks, count, **options)


def measured(name: str, size: int, count: int, link: str, rounds: int) -> dict[str, Any]:
    """One row, on one of the ranks."""
    costs = costs_of(LINKS[link])
    schedule = schedule_of(name, size, count, costs)
    live = Live()
    inputs, targets = data(count)
    losses: list[float | None] = []
    with pipecomm.Pipeline(
        list(stages_of(schedule, dist.get_rank(), live, TIMES)),
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
        emulation=LINKS[link],
    ) as pipeline:
        steps = {name: lambda: losses.append(pipeline.train_step(inputs, targets).loss)}
        timing: Timing = measure_together(steps, rounds)[name]
    peaks = [0] * size
    dist.all_gather_object(peaks, live.peak)
    predicted_s = schedule.simulate(costs).step_s
    return {
        "case": f"{link}, {name} {size}x{count}",
        "step_ms": timing.median_s * 1e3,
        "p90_ms": timing.p90_s * 1e3,
        "predicted_ms": predicted_s * 1e3,
        "predicted_ratio": round(predicted_s / timing.median_s, 4),
        "peaks": " ".join(map(str, peaks)),
        "loss": losses[0],
    }


def run(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    use_fine_timers()
    size = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for count in (m for p, m in SIZES if p == size):
        for link in LINKS:
            case = [measured(name, size, count, link, options.rounds) for name in NAMES]
            losses = [row.pop("loss") for row in case]
            assert rank < size - 1 or max(losses) - min(losses) < 1e-5 * losses[0], losses
            for row in case:
                row["of_1f1b"] = f"{case[0]['step_ms'] / row['step_ms']:.3f} x as fast"
            rows += case
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[size for size, _ in SIZES])
    add_options(parser)
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    rows = [row for size in options.ranks for row in rows_of_ranks(size, run, options)]
    report("slow_links", rows, title="A step over emulated links", save=options.json)


if __name__ == "__main__":
    main()
