"""What a step took on every rank, side by side with what its schedule makes of the same times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipecomm.engine.measured import costs_of, own_times
from pipecomm.engine.stats import StepStats
from pipecomm.memory.pool import MemoryPool, default_pool
from pipecomm.schedule import Schedule, Simulation

__all__ = ["RankReport", "StepReport", "gather_report", "peak_memory_nbytes"]

_Gather = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class RankReport:
    """Of one rank, as in StepStats; seconds and bytes.

    memory_nbytes: on a CUDA device the most that torch had allocated there since its peak was
    reset; on the host the most of the pool of received tensors.
    """

    step_s: float
    compute_s: float
    wait_s: float
    exposed_comm_s: float
    payload_nbytes_sent: int
    wire_nbytes_sent: int
    peak_activations: int
    weight_versions: int
    memory_nbytes: int

    @property
    def bubble(self) -> float:
        """Share of the step in which the rank did not compute."""
        return 1 - self.compute_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True)
class StepReport:
    """Of all ranks, by rank; `planned` is the schedule walked with the times that were measured.

    What planned.step_s leaves of step_s is lost between actions: Python, waking up, the machine's
    other work.
    """

    schedule: str
    ranks: tuple[RankReport, ...]
    planned: Simulation

    @property
    def step_s(self) -> float:
        """Of the rank that took longest."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """Mean over the ranks."""
        return statistics.fmean(rank.bubble for rank in self.ranks)

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}: step {self.step_s * 1e3:.4g} ms, planned "
            f"{self.planned.step_s * 1e3:.4g} ms; bubble {self.bubble:.1%}, planned "
            f"{self.planned.bubble:.1%}",
            "rank  compute ms  exposed ms  bubble  planned  sent MB  on wire MB  kept  memory MB",
        ]
        for index, (rank, planned) in enumerate(
            zip(self.ranks, self.planned.rank_bubbles, strict=True)
        ):
            lines.append(
                f"{index:4}  {rank.compute_s * 1e3:10.4g}  {rank.exposed_comm_s * 1e3:10.4g}  "
                f"{rank.bubble:6.1%}  {planned:7.1%}  {rank.payload_nbytes_sent / 1e6:7.4g}  "
                f"{rank.wire_nbytes_sent / 1e6:10.4g}  {rank.peak_activations:4}  "
                f"{rank.memory_nbytes / 1e6:9.4g}"
            )
        return "\n".join(lines)


def gather_report(
    stats: StepStats, memory_nbytes: int, schedule: Schedule, gather: _Gather
) -> StepReport:
    """The same on every rank; `gather` gives every rank's tensor, in rank order."""
    names = [field.name for field in fields(RankReport)]
    own = [memory_nbytes if name == "memory_nbytes" else getattr(stats, name) for name in names]
    times = own_times(stats, schedule.placement)
    rows = gather(torch.cat([torch.tensor(own, dtype=torch.float64), times.flatten()]))
    ranks = tuple(_rank_report(dict(zip(names, row.tolist(), strict=False))) for row in rows)
    costs = costs_of([row[len(own) :].view_as(times) for row in rows])
    return StepReport(schedule.name, ranks, schedule.simulate(costs))


def peak_memory_nbytes(device: torch.device, pool: MemoryPool | None) -> int:
    """RankReport.memory_nbytes; `pool` None: the default one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return (pool or default_pool()).stats().peak_live_nbytes


def _rank_report(numbers: dict[str, float]) -> RankReport:
    whole = {name: int(value) for name, value in numbers.items() if not name.endswith("_s")}
    return RankReport(**{**numbers, **whole})  # type: ignore[arg-type]
