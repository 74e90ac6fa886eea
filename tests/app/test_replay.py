"""`pipecomm replay` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipecomm.app.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("id,lower,upper,size\na,0,2,8000000\nb,1,3,4000000\n")
    return str(path)


def test_table_tells_what_each_policy_holds(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--fits", "0.03"]) == 0
    out = capsys.readouterr().out
    assert "4 events from MiniMalloc" in out
    for policy in ("lower bound", "pipecomm", "torch", "torch:expandable", "size-classes"):
        assert policy in out
    assert "with torch this run would have fitted in 0.03 GB" in out
    assert main(["replay", trace, "--fits", "0.011"]) == 0
    assert "with pipecomm this run would not have fitted in 0.011 GB" in capsys.readouterr().out


def test_bar_is_drawn_only_for_what_takes_long(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["replay", trace]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("pipecomm.app.replay._QUIET_S", 0.0)
    assert main(["replay", trace]) == 0
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["replay", trace]) == 0
    assert "Replaying" in capsys.readouterr().err


def test_json_is_one_document(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["peak_live_nbytes"] == 12_000_000
    assert document["policies"]["torch"]["peak_reserved_nbytes"] == 20 << 20
    assert document["policies"]["torch"]["fits"] is None


def test_made_up_trace_is_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "unequal-stages", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_events"] > 1000


def test_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["replay", trace, "--plot", str(tmp_path / "memory.svg")]) == 0
    assert "<svg" in (tmp_path / "memory.svg").read_text()


@pytest.mark.parametrize("words", [["/nowhere"], ["TRACE", "--plot", "/nowhere/x.svg"]])
def test_wrong_use_is_told(
    trace: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(trace if word == "TRACE" else word for word in words)]) == 2
    assert "expected" in capsys.readouterr().err
