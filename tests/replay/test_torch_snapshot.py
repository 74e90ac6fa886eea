"""torch's memory snapshots: what is read from them, and what never runs."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.torch_snapshot import load_plain_pickle, trace_from_snapshot

MIB = 1 << 20


def event(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": []}


def snapshot(events: list[dict[str, Any]], *reserved: int) -> dict[str, Any]:
    segments = [{"address": 0, "total_size": size, "device": 0, "stream": 0} for size in reserved]
    return {"segments": segments, "device_traces": [events, []]}


def test_allocations_and_completed_frees_are_the_trace() -> None:
    events = [
        event("segment_alloc", 0, 2 * MIB),
        event("alloc", 0, 700),
        event("alloc", 1024, 800, 5),
        event("free_requested", 0, 700),
        event("free_completed", 0, 700),
        event("alloc", 0, 600),
    ]
    trace = trace_from_snapshot(snapshot(events, 2 * MIB))
    assert trace.ids.tolist() == [0, 1024, 0, 0]
    assert trace.nbytes.tolist() == [700, 800, -1, 600]
    assert trace.streams.tolist() == [0, 5, 0, 0]
    assert trace.reported_reserved_nbytes == 2 * MIB


def test_what_was_live_before_the_recording_is_allocated_first() -> None:
    events = [event("alloc", 0, 10), event("free_completed", 99, 300)]
    trace = trace_from_snapshot(snapshot(events))
    assert trace.ids.tolist() == [99, 0, 99]
    assert trace.nbytes.tolist() == [300, 10, -1]


def test_peak_of_what_was_reserved_is_found_backwards_from_the_end() -> None:
    events = [
        event("alloc", 0, 10),
        event("segment_alloc", 0, 20 * MIB),
        event("segment_map", 0, 30 * MIB),
        event("segment_free", 0, 20 * MIB),
        event("segment_unmap", 0, 5 * MIB),
    ]
    # 27 MiB at the end: 2 before all, 52 in the middle.
    assert trace_from_snapshot(snapshot(events, 27 * MIB)).reported_reserved_nbytes == 52 * MIB


@pytest.mark.parametrize(
    "wrong", [{}, [], None, {"segments": []}, {"segments": 1, "device_traces": [[]]}], ids=repr
)
def test_other_contents_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        trace_from_snapshot(wrong)


def test_snapshot_without_events_says_how_to_record() -> None:
    with pytest.raises(ConfigError, match="_record_memory_history"):
        trace_from_snapshot(snapshot([], MIB))


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_would_run_never_runs(tmp_path: Path, protocol: int) -> None:
    attack = pickle.dumps({"segments": [Attack(tmp_path / "made")]}, protocol)
    with pytest.raises(ConfigError, match="mkdir, which is not loaded"):
        load_plain_pickle(io.BytesIO(attack))
    assert not (tmp_path / "made").exists()
    pickle.loads(attack)  # the control: it would have
    assert (tmp_path / "made").exists()


def test_plain_pickle_comes_back() -> None:
    plain = {"a": [1, 2.5, None, True, "text", b"bytes", (1,)], 3: {"x": -(2**70)}}
    assert load_plain_pickle(io.BytesIO(pickle.dumps(plain))) == plain


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"\x80\x04]q", b"\x80\xff."], ids=repr)
def test_damaged_pickle_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="expected a pickle"):
        load_plain_pickle(io.BytesIO(content))
