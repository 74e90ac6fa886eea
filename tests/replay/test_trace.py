"""Traces in memory and in pipecomm's own file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.trace import Trace, TraceBuilder


def small_trace() -> Trace:
    builder = TraceBuilder("by hand", 4096)
    builder.allocate(7, 100, 3)
    builder.allocate(8, 0)
    builder.free(7, 3)
    return builder.build()


def test_builder_keeps_the_order() -> None:
    trace = small_trace()
    assert trace.num_events == 3
    assert trace.ids.tolist() == [7, 8, 7]
    assert trace.nbytes.tolist() == [100, 0, -1]
    assert trace.streams.tolist() == [3, 0, 3]


def test_saved_trace_comes_back(tmp_path: Path) -> None:
    trace = small_trace()
    trace.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    for name in ("ids", "nbytes", "streams"):
        assert np.array_equal(getattr(loaded, name), getattr(trace, name))
    assert loaded.source == "by hand"
    assert loaded.reported_reserved_nbytes == 4096


def test_file_that_is_no_trace_is_refused() -> None:
    for content in (b"", b"PK\x03\x04 and then nothing", b"text"):
        with pytest.raises(ConfigError, match="expected a trace"):
            Trace.load(io.BytesIO(content))
    other = io.BytesIO()
    np.savez(other, ids=np.zeros(1))
    other.seek(0)
    with pytest.raises(ConfigError, match="expected a trace"):
        Trace.load(other)


@pytest.mark.parametrize("wrong", [np.zeros(2, np.int32), np.zeros((1, 2), np.int64)])
def test_arrays_of_another_kind_are_refused(wrong: np.ndarray) -> None:
    meta = json.dumps({"format": "pipecomm trace", "version": 1, "source": ""})
    file = io.BytesIO()
    np.savez(file, ids=wrong, nbytes=wrong, streams=wrong, meta=meta)
    file.seek(0)
    with pytest.raises(ConfigError, match="int64 arrays of one length"):
        Trace.load(file)


def test_trace_of_another_version_is_refused() -> None:
    file = io.BytesIO()
    numbers = np.zeros(1, np.int64)
    meta = json.dumps({"format": "pipecomm trace", "version": 2})
    np.savez(file, ids=numbers, nbytes=numbers, streams=numbers, meta=meta)
    file.seek(0)
    with pytest.raises(ConfigError, match="version 1"):
        Trace.load(file)
