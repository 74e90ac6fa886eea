"""`pipecomm replay`: a table, a picture, and whether a run would have fitted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pipecomm.errors import ConfigError
from pipecomm.replay import TRACES, Comparison, Trace, compare, generate, load_trace

__all__ = ["run"]

_NUM_SAMPLES = 400
_QUIET_S = 2.0


def run(name: str, *, as_json: bool, plot: str | None, fits_gb: float | None) -> int:
    """Print what the policies make of a trace; returns exit code 0. Raises ConfigError."""
    trace = generate(name) if name in TRACES and not Path(name).exists() else load_trace(name)
    capacity = None if fits_gb is None else round(fits_gb * 1e9)
    num_samples = _NUM_SAMPLES if plot else 0
    with _progress() as on_done:
        comparison = compare(
            trace, capacity_nbytes=capacity, num_samples=num_samples, on_done=on_done
        )
    if plot:
        _draw(comparison, trace, plot)
    if as_json:
        print(json.dumps(_document(comparison, trace, capacity)))
    else:
        print(_table(comparison, trace, fits_gb))
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal, for what takes longer than 2 s."""
    start = time.monotonic()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task("Replaying")

    def on_done(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if console.is_terminal and time.monotonic() - start > _QUIET_S:
            bar.start()

    try:
        yield on_done
    finally:
        if bar.live.is_started:
            bar.stop()


def _document(comparison: Comparison, trace: Trace, capacity: int | None) -> dict[str, Any]:
    return {
        "source": trace.source,
        "num_events": comparison.num_events,
        "peak_live_nbytes": comparison.peak_live_nbytes,
        "reported_reserved_nbytes": trace.reported_reserved_nbytes,
        "capacity_nbytes": capacity,
        "policies": {
            one.policy: {
                "peak_reserved_nbytes": one.peak_reserved_nbytes,
                "reserved_over_live": comparison.ratio(one.policy),
                "num_upstream_calls": one.num_upstream_calls,
                "fits": one.fits,
            }
            for one in comparison.replayed
        },
    }


def _table(comparison: Comparison, trace: Trace, fits_gb: float | None) -> str:
    lines = [
        f"{comparison.num_events} events from {trace.source}",
        f"{'':18}{'peak reserved':>15}{'over live':>11}{'calls':>9}",
        f"{'lower bound':18}{_mib(comparison.peak_live_nbytes):>15}{1:>11.3f}{'':>9}",
    ]
    for one in comparison.replayed:
        lines.append(
            f"{one.policy:18}{_mib(one.peak_reserved_nbytes):>15}"
            f"{comparison.ratio(one.policy):>11.3f}{one.num_upstream_calls:>9}"
        )
    if trace.reported_reserved_nbytes is not None:
        ratio = trace.reported_reserved_nbytes / max(comparison.peak_live_nbytes, 1)
        lines.append(f"{'as recorded':18}{_mib(trace.reported_reserved_nbytes):>15}{ratio:>11.3f}")
    for one in comparison.replayed if fits_gb is not None else ():
        verb = "would" if one.fits else "would not"
        lines.append(f"with {one.policy} this run {verb} have fitted in {fits_gb:g} GB")
    return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _draw(comparison: Comparison, trace: Trace, path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        range(len(comparison.live_nbytes)),
        [nbytes / 2**30 for nbytes in comparison.live_nbytes],
        color="lightgrey",
        label="live",
    )
    for one in comparison.replayed:
        axes.plot([nbytes / 2**30 for nbytes in one.reserved_nbytes], label=one.policy)
    axes.set(
        xlabel="part of the trace", ylabel="GiB reserved", title=trace.source[:80], ylim=(0, None)
    )
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--plot: expected a file that can be written, .svg or .png; got {error}"
        ) from error
