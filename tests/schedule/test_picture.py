"""Pictures and traces of a plan, with what happened under it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, build, save_picture


class Event(NamedTuple):
    name: str
    lane: str
    start_s: float
    end_s: float


RESULT = build("zb-h1", 2, 3).simulate(Costs(1.0, 2.0, 0.5, 0.5))
HAPPENED = {
    0: [Event("0F0", "compute", 100.0, 101.5), Event("send forward 0", "send", 101.5, 102.0)],
    1: [Event("1F0", "compute", 102.0, 103.0)],
}


def test_picture_is_a_png(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.png", RESULT, "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_picture_as_svg_shows_more_with_what_happened(tmp_path: Path) -> None:
    sizes = []
    for name, happened in (("plan.svg", None), ("both.SVG", HAPPENED)):
        save_picture(tmp_path / name, RESULT, "title", happened)
        root = ElementTree.fromstring((tmp_path / name).read_text())
        assert root.tag.endswith("svg")
        sizes.append(len(list(root.iter())))
    assert sizes[1] > sizes[0]


def test_trace_has_plan_and_what_happened_on_one_axis_that_begins_at_0(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_picture(path, RESULT, "title", HAPPENED)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "plan"
    assert names[1, 2] == "happened"
    spans = {
        (e["name"], names[e["pid"], e["tid"]]): (e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    assert spans["0F0", "plan"] == (0, 1e6)
    assert spans["0F0", "happened"] == (0, 1.5e6)
    assert spans["1F0", "happened"] == (2e6, 1e6)
    assert spans["0SEND_F0", "plan: messages"] == (1e6, 0.5e6)
    # Messages that happened are in the engine's own picture.
    assert ("send forward 0", "happened") not in spans
    assert len(spans) == len(RESULT.events) + 2


def test_other_suffix_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ending in \.png, \.svg, \.json; got .*a\.pdf"):
        save_picture(tmp_path / "a.pdf", RESULT, "title")


def test_picture_of_too_many_bars_is_refused_and_a_trace_is_not(tmp_path: Path) -> None:
    result = build("gpipe", 32, 512).simulate()
    with pytest.raises(ConfigError, match="at most 50,000 bars in a picture; got 64,512; write a"):
        save_picture(tmp_path / "a.png", result, "title")


def test_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'pipecomm\[demo\]'"):
        save_picture(tmp_path / "a.png", RESULT, "title")
    save_picture(tmp_path / "a.json", RESULT, "title")
