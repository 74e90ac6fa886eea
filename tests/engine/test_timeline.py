"""Timelines as a trace and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomm.engine.stats import StepStats
from pipecomm.engine.timeline import LANES, TimelineEvent, draw_timeline, stack, write_trace
from pipecomm.schedule import Action, Kind


def event(lane: str, start_s: float, end_s: float, microbatch: int = 0) -> TimelineEvent:
    args = {"direction": "forward", "microbatch": microbatch}
    return TimelineEvent(f"{lane} {microbatch}", lane, start_s, end_s, args)


def events_strategy() -> st.SearchStrategy[list[TimelineEvent]]:
    times = st.tuples(st.integers(0, 30), st.integers(0, 9))
    made = st.builds(lambda lane, t: event(lane, t[0], t[0] + t[1]), st.sampled_from(LANES), times)
    return st.lists(made, max_size=20)


@pytest.fixture
def two_ranks() -> dict[int, list[TimelineEvent]]:
    return {
        0: [event("compute", 10.0, 10.5), event("send", 10.5, 10.9), event("send", 10.6, 11.0, 1)],
        1: [event("wait", 10.1, 10.9), event("recv", 10.55, 10.9), event("compute", 10.9, 11.2)],
    }


def trace_of(path: Path, events: dict[int, list[TimelineEvent]]) -> list[dict[str, Any]]:
    write_trace(path, events)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def test_trace_has_a_slice_per_event_in_microseconds_from_zero(
    tmp_path: Path, two_ranks: dict[int, list[TimelineEvent]]
) -> None:
    slices = [e for e in trace_of(tmp_path / "t.json", two_ranks) if e["ph"] == "X"]
    assert len(slices) == 6
    first = next(e for e in slices if e["name"] == "compute 0" and e["pid"] == 0)
    assert first["ts"] == 0
    assert first["dur"] == pytest.approx(0.5e6)
    last = next(e for e in slices if e["name"] == "compute 0" and e["pid"] == 1)
    assert last["ts"] == pytest.approx(0.9e6)
    assert last["args"] == {"direction": "forward", "microbatch": 0}


def test_trace_names_a_process_per_rank_and_a_thread_per_lane(
    tmp_path: Path, two_ranks: dict[int, list[TimelineEvent]]
) -> None:
    entries = [e for e in trace_of(tmp_path / "t.json", two_ranks) if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["args"]["name"]): e["tid"] for e in entries if e["name"] == "thread_name"
    }
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert set(threads) == {
        (0, "compute"), (0, "send"), (0, "send 2"), (1, "compute"), (1, "wait"), (1, "recv"),
    }  # fmt: skip
    assert len({(pid, tid) for (pid, _), tid in threads.items()}) == len(threads)


@given(events=events_strategy())
def test_slices_of_one_thread_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, events: list[TimelineEvent]
) -> None:
    path = tmp_path_factory.getbasetemp() / "overlap.json"
    by_thread: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for entry in trace_of(path, {0: events}):
        if entry["ph"] == "X":
            by_thread[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert sum(map(len, by_thread.values())) == len(events)


def test_stack_uses_one_row_where_nothing_overlaps() -> None:
    events = [event("send", 1, 2), event("send", 0, 1), event("send", 2, 3)]
    assert [[e.start_s for e in row] for row in stack(events)] == [[0, 1, 2]]


def test_stack_of_nothing_is_empty() -> None:
    assert stack([]) == []


def test_trace_of_no_events_is_valid(tmp_path: Path) -> None:
    assert all(e["ph"] == "M" for e in trace_of(tmp_path / "t.json", {0: []}))


@pytest.mark.parametrize("number", [0, 1, 200])
def test_picture_is_a_png_of_any_number_of_events(tmp_path: Path, number: int) -> None:
    path = tmp_path / "t.png"
    draw_timeline(path, {0: [event("compute", n, n + 0.5, n) for n in range(number)]}, "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_picture_shows_each_kind_in_its_colour(
    tmp_path: Path, two_ranks: dict[int, list[TimelineEvent]]
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    backward = TimelineEvent("1B0", "compute", 11.2, 11.6, {"direction": "backward"})
    two_ranks[1].append(backward)
    path = tmp_path / "t.png"
    draw_timeline(path, two_ranks, "two ranks")
    pixels = imread(path)[:, :, :3]
    # A legend patch has some hundred pixels; a bar here has thousands.
    for colour in ("#4878d0", "#6acc64", "#ee854a", "#b47cc7", "#d9d9d9"):
        matching = (abs(pixels - to_rgb(colour)) < 0.01).all(axis=2).sum()
        assert matching > 1000, colour


def test_picture_shows_what_works_on_weights(tmp_path: Path) -> None:
    stats = StepStats()
    for place, kind in enumerate((Kind.F, Kind.I, Kind.W, Kind.U)):
        stats.add_compute(Action(kind, 0, 0), place, place + 1)
    draw_timeline(tmp_path / "weights.png", {0: stats.events}, "title")
    assert [event.args["direction"] for event in stats.events] == [
        *("forward", "backward", "weights", "weights")
    ]
    assert (tmp_path / "weights.png").stat().st_size > 1000


def test_events_are_hashable_and_equal_by_value() -> None:
    assert event("send", 0, 1) == event("send", 0, 1)
    assert len({event("send", 0, 1), event("send", 0, 1), event("send", 0, 2)}) == 2
