"""A simulated step as a picture or a trace; with what happened under it, on one time axis."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipecomm.errors import ConfigError
from pipecomm.schedule.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Recorded", "save_picture"]

_COLOURS = {
    "F": "#4878d0",
    "B": "#6acc64",
    "I": "#8fd98a",
    "W": "#3f8f3a",
    "U": "#b47cc7",
    "SEND": "#ee854a",
}
_SUFFIXES = (".png", ".svg", ".json")
# Bars narrower than this share of the picture carry no text and no edge.
_MIN_LABEL_SHARE = 0.012
# More bars than anyone can tell apart; they would take minutes and gigabytes.
_MAX_BARS = 50_000


class Recorded(Protocol):
    """An event of pipecomm.timeline: `name` ("0F3") was in `lane` from start_s to end_s."""

    @property
    def name(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class _Bar(NamedTuple):
    rank: int
    # 0: planned compute, 1: planned messages, 2: compute that happened.
    row: int
    text: str
    start_s: float
    end_s: float


def save_picture(
    path: str | os.PathLike[str],
    simulation: Simulation,
    title: str,
    happened: Mapping[int, Iterable[Recorded]] | None = None,
) -> None:
    """Write a PNG or SVG picture, or a Chrome trace (.json, which Perfetto opens).

    Two rows per rank, planned compute and planned messages, and with `happened` (by rank, the
    events of one step, from any zero of time) a third one: what was computed when. Both begin at
    0. Raises ConfigError for another suffix, for more than 50,000 bars in a picture, and, naming
    what to install, for a picture without matplotlib.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(f"expected a file name ending in {', '.join(_SUFFIXES)}; got {path}")
    bars = [*_planned(simulation), *_recorded(happened or {})]
    if suffix == ".json":
        _write_trace(Path(path), bars)
    elif len(bars) > _MAX_BARS:
        raise ConfigError(
            f"expected at most {_MAX_BARS:,} bars in a picture; got {len(bars):,}; write a trace "
            "(.json) or draw fewer ranks and microbatches"
        )
    else:
        _write_picture(Path(path), bars, title, 3 if happened else 2)


def _planned(simulation: Simulation) -> Iterator[_Bar]:
    for rank, action, start_s, end_s in simulation.events:
        yield _Bar(rank, 0 if action.kind.is_compute else 1, str(action), start_s, end_s)


def _recorded(happened: Mapping[int, Iterable[Recorded]]) -> Iterator[_Bar]:
    events = {
        rank: [event for event in given if event.lane == "compute"]
        for rank, given in happened.items()
    }
    origin_s = min((event.start_s for given in events.values() for event in given), default=0.0)
    for rank, given in events.items():
        for event in given:
            yield _Bar(rank, 2, event.name, event.start_s - origin_s, event.end_s - origin_s)


_ROWS = ("plan", "plan: messages", "happened")


def _write_trace(path: Path, bars: list[_Bar]) -> None:
    entries: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({bar.rank for bar in bars})
    ]
    entries += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": _ROWS[row]}}
        for rank, row in sorted({(bar.rank, bar.row) for bar in bars})
    ]
    entries += [
        {
            "ph": "X",
            "name": bar.text,
            "pid": bar.rank,
            "tid": bar.row,
            "ts": bar.start_s * 1e6,
            "dur": (bar.end_s - bar.start_s) * 1e6,
        }
        for bar in bars
    ]
    document = {"traceEvents": entries, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document), encoding="utf-8")


def _write_picture(path: Path, bars: list[_Bar], title: str, num_rows: int) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"expected matplotlib for the picture {path}; got none; pip install 'pipecomm[demo]', "
            "or write a trace (.json)"
        ) from None
    ranks = 1 + max(bar.rank for bar in bars)
    end_s = max(bar.end_s for bar in bars)
    figure = Figure(figsize=(14, 1.4 + 0.4 * num_rows * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(0, max(end_s, 1e-9) * 1e3)
    for bar in bars:
        _draw_bar(axes, bar, (num_rows + 1) * bar.rank + bar.row)
    labels = [f"rank {rank} {name}" for rank in range(ranks) for name in _ROWS[:num_rows]]
    tops = [(num_rows + 1) * rank + row for rank in range(ranks) for row in range(num_rows)]
    axes.set_yticks([top + 0.45 for top in tops], labels)
    axes.set_ylim((num_rows + 1) * ranks - 1, -0.1)
    axes.set_xlabel("ms since the step began")
    axes.set_title(title, loc="left")
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=110)


def _draw_bar(axes: Axes, bar: _Bar, top: int) -> None:
    start_ms, width_ms = bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3
    letters = bar.text.lstrip("0123456789")
    kind = "SEND" if letters.startswith("SEND") else letters[:1]
    colour = _COLOURS.get(kind, "#d9d9d9")
    is_wide = width_ms > _MIN_LABEL_SHARE * axes.get_xlim()[1]
    axes.broken_barh(
        [(start_ms, width_ms)],
        (top, 0.9),
        facecolors=colour,
        # A white edge would cover a bar as thin as a line.
        edgecolors="white" if is_wide else colour,
        linewidth=0.5,
    )
    if is_wide:
        text = letters.rsplit("_", 1)[-1]
        axes.annotate(
            text, (start_ms + width_ms / 2, top + 0.45), ha="center", va="center", fontsize=7
        )
