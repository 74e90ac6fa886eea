"""What benchmarks share: interleaved timing, one table, JSON lines with their provenance."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pipecomm._native import core

__all__ = [
    "Timing",
    "add_options",
    "add_save_option",
    "measure",
    "progress",
    "provenance",
    "report",
]

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds per call over all rounds."""

    p10_s: float
    median_s: float
    p90_s: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Timing:
        deciles = statistics.quantiles(samples_s, n=10, method="inclusive")
        return cls(deciles[0], statistics.median(samples_s), deciles[-1])


def measure(
    calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, Timing]:
    """Time each call once per round, in turn, so that all see the same machine.

    The first ``warmup`` rounds are not timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup):
        for call in calls.values():
            call()
    for _ in range(max(2, rounds)):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: Timing.of(values) for name, values in samples.items()}


def provenance() -> dict[str, Any]:
    """Machine, commit and build: what a number is worth without cannot be told."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=root
    ).stdout.strip()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit,
        "torch": torch.__version__,
        "build": core.build_info(),
        "isa": core.codec_isa(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options every benchmark has."""
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case")
    add_save_option(parser)


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """The option of those that have no rounds."""
    parser.add_argument("--json", action="store_true", help=f"append to {RESULTS.name}/*.jsonl")


def progress(items: Iterable[T], total: int, what: str) -> Iterable[T]:
    """The items, with a bar on stderr."""
    return track(items, what, total, console=Console(stderr=True))


def report(name: str, rows: Sequence[Mapping[str, Any]], *, title: str, save: bool) -> None:
    """Print the rows as one table; with ``save`` append them to results/<name>.jsonl."""
    table = Table(title=title)
    for column in rows[0]:
        is_case = column == "case"
        table.add_column(column, justify="left" if is_case else "right", no_wrap=is_case)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=max(160, Console().width)).print(table)
    if save:
        RESULTS.mkdir(exist_ok=True)
        where = provenance()
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps({**row, **where}) + "\n" for row in rows)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
