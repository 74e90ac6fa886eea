"""Files of each format, told apart by what is in them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.load import load_trace
from pipecomm.replay.trace import TraceBuilder


def test_each_format_is_known_by_its_content(tmp_path: Path) -> None:
    builder = TraceBuilder("by hand")
    builder.allocate(1, 5)
    builder.build().save(tmp_path / "own.npz")
    events = [{"action": "alloc", "addr": 1, "size": 5, "stream": 0}]
    snapshot = {"segments": [], "device_traces": [events]}
    (tmp_path / "snapshot").write_bytes(pickle.dumps(snapshot))
    (tmp_path / "stalloc").write_text("\n1 1 5 0\n")
    (tmp_path / "minimalloc").write_text("id,lower,upper,size\n1,0,1,5\n")
    sources = ("own.npz", "by hand"), ("snapshot", "torch snapshot"), ("stalloc", "STAlloc")
    for name, source in (*sources, ("minimalloc", "MiniMalloc")):
        trace = load_trace(tmp_path / name)
        assert trace.source == source
        assert trace.nbytes[0] == 5


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff\xfe\x00", b"3 4 5 6"], ids=repr)
def test_unknown_content_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match="expected a pipecomm trace"):
        load_trace(tmp_path / "file")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be read"):
        load_trace(tmp_path / "nowhere")
