"""`pipecomm simulate`: predicts a step of a schedule, or of all of them side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

from pipecomm.errors import ConfigError
from pipecomm.schedule import (
    Candidate,
    Costs,
    Kind,
    Schedule,
    Simulation,
    best,
    candidates,
    read_costs,
    save_picture,
)

__all__ = ["simulate"]

# Larger drawings do not fit a screen.
_MAX_DRAWN_RANKS, _MAX_DRAWN_SLOTS = 16, 64
_BAR_AFTER_S = 2.0


def simulate(args: argparse.Namespace) -> int:
    """Run the command; gives the exit code. Raises ConfigError for what cannot be, OSError."""
    try:
        costs = _costs(args)
        return _compare(args, costs) if args.compare else _simulate_one(args, costs)
    except OSError as error:
        # Some errors of ours are OSErrors too.
        if error.filename is None:
            raise
        raise ConfigError(
            f"expected a file that can be used; got {error.filename}: {error.strerror}"
        ) from None


def _costs(args: argparse.Namespace) -> Costs:
    """Those of the file, with the options that are given in place of its values."""
    costs = read_costs(args.costs) if args.costs is not None else None
    default = {} if costs is not None else {"forward_s": 1e-3, "backward_s": 2e-3}
    given: dict[str, Any] = {
        name: _seconds(milliseconds)
        for names, milliseconds in (
            (("forward_s",), args.forward_ms),
            (("backward_s",), args.backward_ms),
            (("backward_weight_s",), args.weight_ms),
            (("forward_transfer_s", "backward_transfer_s"), args.transfer_ms),
            (("latency_s",), args.latency_ms),
        )
        if milliseconds is not None
        for name in names
    }
    return replace(costs or Costs(), **{**default, **given})


def _seconds(milliseconds: list[float]) -> float | list[float]:
    seconds = [value / 1e3 for value in milliseconds]
    return seconds[0] if len(seconds) == 1 else seconds


def _schedule(args: argparse.Namespace, costs: Costs) -> Schedule:
    # The package's names, so that a caller can replace them.
    from pipecomm import schedule

    if args.csv is not None:
        return Schedule.from_csv(args.csv)
    ranks = args.ranks
    options: dict[str, Any] = {}
    if args.update_every is not None:
        options["update_every"] = args.update_every
    if args.schedule.lower() == "planned":
        options |= {"costs": costs, "max_activations": args.max_activations}
    return schedule.build(args.schedule, args.stages, args.microbatches, ranks, **options)


def _simulate_one(args: argparse.Namespace, costs: Costs) -> int:
    schedule = _schedule(args, costs)
    with _Bar() as bar:
        result = schedule.simulate(costs, bar)
    if args.plot is not None:
        save_picture(args.plot, result, f"{schedule.name}: {result.step_s * 1e3:g} ms")
    if args.json:
        print(json.dumps({**_size(schedule), **_numbers(schedule, result)}))
        return 0
    if _fits_screen(schedule):
        print(f"{schedule.draw()}\n")
    print(_summary(result))
    peaks = schedule.peak_activations()
    for rank, (bubble, exposed_s) in enumerate(
        zip(result.rank_bubbles, result.exposed_comm_s, strict=True)
    ):
        if rank == _MAX_DRAWN_RANKS:
            print(f"... {len(schedule.ranks)} ranks in all; --json has each")
            break
        own = "+".join(str(peaks[stage]) for stage in schedule.placement.stages_of(rank))
        print(
            f"rank {rank}: bubble {bubble:.1%}, exposed communication {exposed_s * 1e3:g} ms, "
            f"at most {own} microbatches in memory{_memory_text(result, rank)}"
        )
    return 0


def _summary(result: Simulation) -> str:
    reduction = f", reduction {result.exposed_reduce_s * 1e3:g} ms of it" * bool(
        result.exposed_reduce_s
    )
    return (
        f"step {result.step_s * 1e3:g} ms, bubble {result.bubble:.1%}, "
        f"{result.num_messages} messages{reduction}"
    )


def _memory_text(result: Simulation, rank: int) -> str:
    nbytes = result.peak_nbytes[rank]
    return f", {nbytes / 2**30:.3g} GiB" if nbytes else ""


def _fits_screen(schedule: Schedule) -> bool:
    slots = 3 if Kind.I in schedule.kinds else 2
    longest = max(len(row) for row in schedule.ranks)
    return len(schedule.ranks) <= _MAX_DRAWN_RANKS and slots * longest <= 4 * _MAX_DRAWN_SLOTS


def _size(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "ranks": len(schedule.ranks),
        "microbatches": schedule.num_microbatches,
    }


def _numbers(schedule: Schedule, result: Simulation) -> dict[str, Any]:
    return {
        "step_s": result.step_s,
        "bubble": result.bubble,
        "exposed_comm_s": list(result.exposed_comm_s),
        "exposed_reduce_s": result.exposed_reduce_s,
        "messages": result.num_messages,
        "peak_activations": list(schedule.peak_activations()),
        "peak_nbytes": list(result.peak_nbytes),
    }


def _compare(args: argparse.Namespace, costs: Costs) -> int:
    num_ranks = args.ranks or args.stages
    found = candidates(num_ranks, args.microbatches, costs)
    in_bytes = any(c.simulation is not None and any(c.simulation.peak_nbytes) for c in found)
    limit = args.memory_limit
    chosen = best(found, limit * 2**30 if limit and in_bytes else limit, in_bytes=in_bytes)
    if args.json:
        rows = [
            {"schedule": c.name, "refused": c.refusal}
            if c.schedule is None or c.simulation is None
            else {
                **_size(c.schedule),
                **_numbers(c.schedule, c.simulation),
                "synchronous": c.is_synchronous,
                "peak_microbatches": c.peak_activations,
            }
            for c in found
        ]
        print(json.dumps({"schedules": rows, "take": chosen.name if chosen else None}))
        return 0
    _print_table(found, in_bytes)
    unit = "GiB" if in_bytes else "microbatches"
    under = f" under {limit:g} {unit}" if limit else ""
    print(
        f"\nno schedule keeps to {limit:g} {unit}: use more ranks or smaller microbatches"
        if chosen is None
        else f"\ntake {chosen.name}{under} (the fastest with one update a step)"
    )
    return 0


def _print_table(found: list[Candidate], in_bytes: bool) -> None:
    memory = "GiB" if in_bytes else "microbatches"
    print(f"{'schedule':14} {'step ms':>10} {'bubble':>7} {'exposed ms':>10} {memory:>12} messages")
    for candidate in found:
        result = candidate.simulation
        if result is None:
            print(f"{candidate.name:14} {candidate.refusal.split(': ', 1)[-1]}")
            continue
        kept = max(result.peak_nbytes) / 2**30 if in_bytes else candidate.peak_activations
        late = "" if candidate.is_synchronous else "  (several updates a step)"
        print(
            f"{candidate.name:14} {result.step_s * 1e3:10.5g} {result.bubble:7.1%} "
            f"{max(result.exposed_comm_s) * 1e3:10.4g} {kept:12.4g} {result.num_messages:8}{late}"
        )


class _Bar:
    """A progress bar on stderr, if that is a terminal, once the work has taken two seconds."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._shown: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def __call__(self, share: float) -> None:
        if self._shown is None:
            if time.monotonic() - self._began_s < _BAR_AFTER_S or not sys.stderr.isatty():
                return
            from rich.console import Console
            from rich.progress import Progress

            self._shown = Progress(console=Console(stderr=True), transient=True)
            self._task = self._shown.add_task("simulating", total=1.0)
            self._shown.start()
        self._shown.update(self._task, completed=share)
