"""All schedules side by side for given costs, and which one to take under a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipecomm.errors import ConfigError
from pipecomm.schedule.builders import build, known_schedules
from pipecomm.schedule.costs import Costs
from pipecomm.schedule.data import Weights
from pipecomm.schedule.memory import peak_per_rank
from pipecomm.schedule.schedule import Schedule
from pipecomm.schedule.simulate import Simulation

__all__ = ["Candidate", "best", "candidates"]

_TWO_PER_RANK = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")


class Candidate(NamedTuple):
    """A schedule at the size asked for, with its prediction; or why it has no form of it.

    peak_activations: of the rank that keeps the most, in microbatches through all its stages.
    """

    name: str
    num_stages: int
    schedule: Schedule | None
    simulation: Simulation | None
    peak_activations: float
    refusal: str

    @property
    def is_synchronous(self) -> bool:
        return self.schedule is not None and self.schedule.weights is Weights.ONE


def candidates(num_ranks: int, num_microbatches: int, costs: Costs) -> list[Candidate]:
    """Every named schedule, with one stage per rank or, where it has more, two.

    `costs` are those of one stage per rank; where a rank has two, each is taken as half of its
    stage. `planned` is given 1F1B's memory. Asynchronous schedules are simulated for the
    microbatches of one step too, filling and draining included.
    """
    return [_candidate(name, num_ranks, num_microbatches, costs) for name in known_schedules()]


def _candidate(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> Candidate:
    parts = 2 if name in _TWO_PER_RANK else 1
    num_stages = parts * num_ranks
    options = {"costs": costs} if name == "planned" else {}
    try:
        schedule = build(name, num_stages, num_microbatches, num_ranks, **options)
        simulation = schedule.simulate(costs.on(schedule.placement))
    except ConfigError as error:
        return Candidate(name, num_stages, None, None, 0.0, str(error).splitlines()[0])
    share = [1.0 / parts] * num_stages
    peak = max(peak_per_rank(schedule, share, share))
    return Candidate(name, num_stages, schedule, simulation, peak, "")


def best(
    found: Sequence[Candidate], memory_limit: float | None = None, *, in_bytes: bool = True
) -> Candidate | None:
    """The fastest synchronous one within the limit; of equally fast ones that with least memory.

    memory_limit: for each rank, in bytes as `Simulation.peak_nbytes`, or in microbatches as
    `peak_activations`; None: none. Gives None if no schedule keeps to it.
    """
    fitting: list[tuple[float, float, float, int, Candidate]] = []
    for candidate in found:
        if candidate.simulation is None or not candidate.is_synchronous:
            continue
        memory = max(candidate.simulation.peak_nbytes) if in_bytes else candidate.peak_activations
        if memory_limit is None or memory <= memory_limit:
            # Rounded, so that the last digits of sums in another order do not decide.
            step_s = float(f"{candidate.simulation.step_s:.9g}")
            fitting.append((step_s, memory, candidate.peak_activations, len(fitting), candidate))
    return min(fitting)[-1] if fitting else None
