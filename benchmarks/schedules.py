"""How much of what a schedule allows does a step reach, beside torch's pipelining, and why not all?

Stages sleep, so that two cores stand for many devices; a message has 256 KiB. `theory` is the walk
of the schedule's lists with the nominal times and nothing else, `used` its share of the step, and
`torch` that of torch.distributed.pipelining over gloo. `predicted` is the same walk with what was
measured in the run, against the mean step: what an action takes, what Python takes between two,
and how long a message is on its way until who waits for it goes on. Each of these adds, put into
the walk one after the other, so many percent of the theory: `timer` (actions that sleep longer than
they should, and what stages compute), `loss` function, `python`, `copy`, `wakeup`. `bubble_ms` is
what the step takes beyond a rank's own work, `idle_ms` the part of it between a rank's first action
and its last. `peaks` are the most microbatches (stages of them) that ranks were seen to keep.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _harness import Timing, add_options, report
from _ranks import rows_of_ranks
from _sleeping import TIMES, Live, data, measure_together, stages_of, use_fine_timers
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import pipecomm
from pipecomm.engine.stats import StepStats
from pipecomm.schedule import Action, Costs, Kind, Schedule, build
from pipecomm.schedule.memory import peak_per_rank

SIZES = ((4, 8), (4, 16), (8, 32))
NAMES = (
    *("sequential", "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"),
    *("zb-h1", "zb-v", "dualpipe-v", "planned"),
)
TWO_PER_RANK = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")
# Its split backwards make gradients of weights where no hook sleeps.
TORCHS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

Step = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Of one rank in one step, in seconds: actions by kind and stage, between two, messages."""

    action_s: dict[tuple[Kind, int], list[float]]
    between_s: float
    # Between the rank's first action and its last, without any.
    idle_s: float
    step_s: float
    # From when to when a message was sent: (direction, stage that takes it, microbatch).
    sent_s: dict[tuple[str, int, int], float]
    # When it had arrived, and when who waited for it went on.
    arrived_s: dict[tuple[str, int, int], tuple[float, float]]


def measured(stats: StepStats) -> Measured:
    action_s: dict[tuple[Kind, int], list[float]] = {}
    sent_s, arrived_s = {}, {}
    computed = [event for event in stats.events if event.lane == "compute"]
    for event in stats.events:
        seconds = event.end_s - event.start_s
        direction, stage = event.args["direction"], event.args["stage"]
        key = (direction, stage, event.args["microbatch"])
        if event.lane == "compute":
            action_s.setdefault(Action.parse(event.name)[:2], []).append(seconds)
        elif event.lane == "send":
            taker = stage + 1 if direction == "forward" else stage - 1
            sent_s[direction, taker, event.args["microbatch"]] = event.start_s
        elif event.lane == "wait" and " recv " in event.name:
            arrived_s[key] = (event.start_s, event.end_s)
    for event in stats.events:
        key = (event.args["direction"], event.args["stage"], event.args["microbatch"])
        if event.lane == "recv" and key in arrived_s:
            began_s, went_on_s = arrived_s[key]
            # Of messages that were there before somebody waited, nothing was lost.
            arrived_s[key] = (max(began_s, event.end_s), went_on_s)
    between_s = (stats.step_s - stats.compute_s - stats.wait_s) / len(computed)
    idle_s = computed[-1].end_s - computed[0].start_s - stats.compute_s
    return Measured(action_s, between_s, idle_s, stats.step_s, sent_s, arrived_s)


def parts_of(name: str) -> int:
    return 2 if name in TWO_PER_RANK else 1


def schedule_of(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    costs = nominal(1)
    options = {"costs": costs} if name == "planned" else {}
    return build(name, parts_of(name) * num_ranks, num_microbatches, num_ranks, **options)


def nominal(parts: int) -> Costs:
    times = TIMES.per_part(parts)
    return Costs(times.forward_s, times.backward_s, backward_weight_s=times.weight_s)


def torchs_step(schedule: Schedule, rank: int, inputs: Tensor, targets: Tensor) -> Step:
    own = schedule.placement.stages_of(rank)
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(module, index, schedule.num_stages, cpu)
        for module, index in zip(stages_of(schedule, rank), own, strict=True)
    ]
    given = stages if len(stages) > 1 else stages[0]
    count = schedule.num_microbatches
    theirs = TORCHS[schedule.name](given, count, loss_fn=nn.functional.mse_loss)
    arguments = (inputs,) if 0 in own else ()
    has_last = schedule.num_stages - 1 in own

    def step() -> float | None:
        losses: list[Tensor] = []
        theirs.step(*arguments, **({"target": targets, "losses": losses} if has_last else {}))
        return torch.stack(losses).mean().item() if losses else None

    return step


class Case:
    """One schedule of one size, on one rank, and what its steps were measured to take."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.live = Live()
        count = schedule.num_microbatches
        inputs, targets = data(count)
        pipeline = pipecomm.Pipeline(
            list(stages_of(schedule, rank, self.live)),
            schedule=schedule,
            num_microbatches=count,
            loss_fn=nn.functional.mse_loss,
        )
        self.found: list[Measured] = []

        def step() -> float | None:
            result = pipeline.train_step(inputs, targets)
            self.found.append(measured(result.stats))
            return result.loss

        self.steps: dict[str, Callable[[], Any]] = {"pipecomm": step}
        if schedule.name in TORCHS:
            self.steps["torch"] = torchs_step(schedule, rank, inputs, targets)
        check_losses(self.steps)
        self.found.clear()
        self.close = pipeline.close

    def row(self, timings: dict[str, Timing]) -> dict[str, Any]:
        found: list[list[Measured]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, self.found)
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, self.live.peak)
        return row_of(self.schedule, found, peaks, timings)


def check_losses(steps: dict[str, Callable[[], Any]]) -> None:
    losses = [loss for loss in (step() for step in steps.values()) if loss is not None]
    assert not losses or max(losses) - min(losses) < 1e-5 * abs(losses[0]), losses


def row_of(
    schedule: Schedule, found: list[list[Measured]], peaks: list[int], timings: dict[str, Timing]
) -> dict[str, Any]:
    walks = [schedule.simulate(costs).step_s for costs in costs_one_by_one(schedule, found)]
    theory_s, predicted_s = walks[0], walks[-1]
    step_s = timings["pipecomm"].median_s
    torch_s = timings["torch"].median_s if "torch" in timings else None
    each = [1.0] * schedule.num_stages
    expected = [round(peak) for peak in peak_per_rank(schedule, each, each)]
    lost = {
        cause: f"{(after - before) / theory_s:.1%}"
        for cause, (before, after) in zip(CAUSES, itertools.pairwise(walks), strict=True)
    }
    # The mean, as the costs of the prediction are means.
    mean_s = statistics.fmean(
        max(step.step_s for step in ranks) for ranks in zip(*found, strict=True)
    )
    return {
        "case": f"{schedule.name} {len(schedule.ranks)}x{schedule.num_microbatches}",
        "theory_ms": round(theory_s * 1e3),
        "step_ms": round(step_s * 1e3, 1),
        "used": round(theory_s / step_s, 4),
        "torch": round(theory_s / torch_s, 4) if torch_s else None,
        "predicted": round(predicted_s / mean_s, 4),
        **lost,
        "bubble_ms": round((step_s - ideal_s(schedule)) * 1e3, 1),
        "idle_ms": round(
            statistics.fmean(step.idle_s for ranks in found for step in ranks) * 1e3, 1
        ),
        "peaks": " ".join(map(str, peaks)),
        "checked": " ".join(map(str, expected)),
    }


def ideal_s(schedule: Schedule) -> float:
    return schedule.num_microbatches * (TIMES.forward_s + TIMES.backward_s)


CAUSES = ("timer", "loss", "python", "copy", "wakeup")


def costs_one_by_one(schedule: Schedule, found: list[list[Measured]]) -> list[Costs]:
    """The nominal ones, and then as they are found to be, with one cause of CAUSES more each."""
    samples: dict[tuple[Kind, int], list[float]] = {}
    between: list[float] = []
    for step in (step for of_rank in found for step in of_rank):
        between.append(step.between_s)
        for key, seconds in step.action_s.items():
            samples.setdefault(key, []).extend(seconds)
    action_s = {key: statistics.fmean(seconds) for key, seconds in samples.items()}
    last = (Kind.F, schedule.num_stages - 1)
    others = [s for (kind, stage), s in action_s.items() if kind is Kind.F and stage != last[1]]
    without_loss = {**action_s, last: statistics.fmean(others)}
    between_s = statistics.fmean(between)
    copy_s, waking_s = message_s(found)
    return [
        nominal(parts_of(schedule.name)),
        costs_of(schedule, without_loss),
        costs_of(schedule, action_s),
        costs_of(schedule, action_s, between_s),
        costs_of(schedule, action_s, between_s, copy_s),
        costs_of(schedule, action_s, between_s, copy_s + waking_s),
    ]


def costs_of(
    schedule: Schedule,
    action_s: dict[tuple[Kind, int], float],
    between_s: float = 0.0,
    latency_s: float = 0.0,
) -> Costs:
    def of_stages(kind: Kind) -> list[float]:
        parts = nominal(parts_of(schedule.name))
        default = parts.forward_s if kind is Kind.F else parts.backward_s
        assert isinstance(default, float)
        # A stage whose backwards are all in parts, or all whole, has no other.
        return [
            action_s.get((kind, stage), default) + between_s for stage in range(schedule.num_stages)
        ]

    has_parts = any(kind is Kind.I for kind, _ in action_s)
    return Costs(
        of_stages(Kind.F),
        of_stages(Kind.B),
        backward_input_s=of_stages(Kind.I) if has_parts else None,
        backward_weight_s=of_stages(Kind.W) if has_parts else None,
        latency_s=latency_s,
    )


def message_s(found: list[list[Measured]]) -> tuple[float, float]:
    """Of messages that somebody waited for: until they had arrived, and then until he went on."""
    copies, wakings = [], []
    for steps in zip(*found, strict=True):
        sent = {key: at for step in steps for key, at in step.sent_s.items()}
        for step in steps:
            for key, (arrived_s, went_on_s) in step.arrived_s.items():
                if key in sent and arrived_s > sent[key]:
                    copies.append(arrived_s - sent[key])
                    wakings.append(went_on_s - arrived_s)
    return median(copies), median(wakings)


def median(values: Iterable[float]) -> float:
    return statistics.median([*values, 0.0])


def run(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    use_fine_timers()
    size = dist.get_world_size()
    rows = []
    for count in (m for p, m in SIZES if p == size):
        for name in options.schedules:
            case = Case(schedule_of(name, size, count), rank)
            rows.append(case.row(measure_together(case.steps, options.rounds)))
            case.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    add_options(parser)
    parser.set_defaults(rounds=7)
    options = parser.parse_args()
    rows = [row for size in options.ranks for row in rows_of_ranks(size, run, options)]
    title = "A training step of sleeping stages"
    report("schedules", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
