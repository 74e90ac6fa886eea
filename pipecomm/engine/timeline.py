"""What happened when in a step: events, as a trace that Perfetto opens and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LANES", "TimelineEvent", "draw_timeline", "stack", "write_trace"]

LANES = ("compute", "wait", "send", "recv")

_BAR_COLOURS = {
    "forward": "#4878d0",
    "backward": "#6acc64",
    "weights": "#3d8f38",
    "wait": "#d9d9d9",
    "send": "#ee854a",
    "recv": "#b47cc7",
}
# Bars narrower than this share of the picture carry no text and no edge.
_MIN_LABEL_SHARE = 0.012


@dataclass(frozen=True)
class TimelineEvent:
    """`name` ("0F3", "send forward 3") occupied `lane` from start_s to end_s (time.monotonic).

    Lanes are "compute", "wait" (the compute thread waits for a transfer), "send" and "recv".
    """

    name: str
    lane: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)


def write_trace(path: str | Path, events_by_rank: Mapping[int, Iterable[TimelineEvent]]) -> None:
    """Write a Chrome trace: a process per rank, a thread per lane, time in microseconds from 0."""
    events = {rank: list(given) for rank, given in events_by_rank.items()}
    origin_s = min((e.start_s for given in events.values() for e in given), default=0.0)
    entries = [entry for rank, given in events.items() for entry in _entries(rank, given, origin_s)]
    document = {"traceEvents": entries, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def draw_timeline(
    path: str | Path, events_by_rank: Mapping[int, Iterable[TimelineEvent]], title: str
) -> None:
    """Write a PNG with three rows per rank: compute and its waits, sends, receives."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = {rank: list(given) for rank, given in sorted(events_by_rank.items())}
    origin_s = min((e.start_s for given in events.values() for e in given), default=0.0)
    end_s = max((e.end_s for given in events.values() for e in given), default=origin_s)
    figure = Figure(figsize=(14, 1.4 + 1.3 * len(events)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(0, max(end_s - origin_s, 1e-6) * 1e3)
    for position, (rank, given) in enumerate(events.items()):
        _draw_rank(axes, rank, 4 * position, given, origin_s)
    _label_rows(axes, list(events))
    axes.set_xlabel("ms since the step began")
    patches = [Patch(color=colour, label=name) for name, colour in _BAR_COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)
    axes.set_title(title, loc="left")
    figure.savefig(path, format="png", dpi=110)


def stack(events: Iterable[TimelineEvent]) -> list[list[TimelineEvent]]:
    """The events in as few rows as needed so that no two in a row overlap."""
    rows: list[list[TimelineEvent]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        row = next((row for row in rows if row[-1].end_s <= event.start_s), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _entries(rank: int, events: list[TimelineEvent], origin_s: float) -> list[dict[str, Any]]:
    entries = [_metadata("process_name", rank, 0, name=f"rank {rank}")]
    entries.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    thread = 0
    for lane in LANES:
        # A thread's slices must not overlap, and several transfers can be on their way at once.
        for number, row in enumerate(stack(e for e in events if e.lane == lane)):
            name = lane if number == 0 else f"{lane} {number + 1}"
            entries.append(_metadata("thread_name", rank, thread, name=name))
            entries.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
            entries.extend(_slice(rank, thread, event, origin_s) for event in row)
            thread += 1
    return entries


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _slice(rank: int, thread: int, event: TimelineEvent, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": rank,
        "tid": thread,
        "ts": (event.start_s - origin_s) * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": dict(event.args),
    }


def _draw_rank(
    axes: Axes, rank: int, top: int, events: Sequence[TimelineEvent], origin_s: float
) -> None:
    for offset, lanes in enumerate((("compute", "wait"), ("send",), ("recv",))):
        own = [event for event in events if event.lane in lanes]
        # One thread computes and waits, so these cannot overlap.
        rows = [own] if "compute" in lanes else stack(own)
        height = 0.9 / max(len(rows), 1)
        for number, row in enumerate(rows):
            for event in row:
                _draw_bar(axes, event, top + offset + number * height, height, origin_s)


def _draw_bar(
    axes: Axes, event: TimelineEvent, bottom: float, height: float, origin_s: float
) -> None:
    start_ms = (event.start_s - origin_s) * 1e3
    width_ms = (event.end_s - event.start_s) * 1e3
    kind = event.args.get("direction", "forward") if event.lane == "compute" else event.lane
    is_wide = width_ms > _MIN_LABEL_SHARE * axes.get_xlim()[1]
    axes.broken_barh(
        [(start_ms, width_ms)],
        (bottom, height),
        facecolors=_BAR_COLOURS[kind],
        # A white edge would cover a bar as thin as a line.
        edgecolors="white" if is_wide else _BAR_COLOURS[kind],
        linewidth=0.5,
        hatch="///" if event.lane == "wait" else None,
    )
    if is_wide and "microbatch" in event.args:
        text = str(event.args["microbatch"])
        middle = (start_ms + width_ms / 2, bottom + height / 2)
        axes.annotate(text, middle, ha="center", va="center", fontsize=7)


def _label_rows(axes: Axes, ranks: list[int]) -> None:
    names = ("compute", "send", "recv")
    middles = [4 * place + row + 0.45 for place in range(len(ranks)) for row in range(len(names))]
    axes.set_yticks(middles, [f"rank {rank} {name}" for rank in ranks for name in names])
    axes.set_ylim(max(4 * len(ranks) - 0.8, 1), -0.3)
