"""Memory snapshots of torch (torch.cuda.memory._dump_snapshot), read without running anything.

A snapshot is a pickle of dicts, lists, strings and numbers. The unpickler here refuses every
class and function, so that a file can give wrong numbers and nothing worse.
"""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO, NoReturn

from pipecomm.errors import ConfigError
from pipecomm.replay.trace import Trace, TraceBuilder

__all__ = ["load_plain_pickle", "trace_from_snapshot"]

_GROWS = {"segment_alloc", "segment_map"}
_SHRINKS = {"segment_free", "segment_unmap"}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ConfigError(
            f"expected a pickle of plain dicts, lists, strings and numbers; got {module}.{name}, "
            "which is not loaded"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise ConfigError(f"expected a pickle without references to elsewhere; got {pid!r}")


def load_plain_pickle(file: BinaryIO) -> Any:
    """Unpickle dicts, lists, tuples, strings, numbers, None. Raises ConfigError for any other."""
    try:
        return _PlainUnpickler(file).load()
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ConfigError(f"expected a pickle; got {type(error).__name__}: {error}") from error


def trace_from_snapshot(snapshot: Any, device: int | None = None) -> Trace:
    """The trace of one device, by default the one with most events, of `_snapshot()`'s dict.

    What was live when recording began and was freed later is allocated first. The reported peak
    is that of all segments over the recorded time. Raises ConfigError where there is no trace.
    """
    try:
        traces = snapshot["device_traces"]
        sizes = [len(trace) for trace in traces]
        chosen = device if device is not None else sizes.index(max(sizes))
        events = traces[chosen]
        actions = [(str(e["action"]), int(e["addr"]), int(e["size"]), int(e["stream"]))
                   for e in events if "addr" in e]  # fmt: skip
        reserved = sum(
            int(segment["total_size"])
            for segment in snapshot["segments"]
            if int(segment.get("device", 0)) == chosen
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            "expected torch's memory snapshot, a dict with 'segments' and 'device_traces'; got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not actions:
        raise ConfigError(
            "expected a snapshot with events; got none; call "
            "torch.cuda.memory._record_memory_history() before what is to be recorded"
        )
    builder = TraceBuilder("torch snapshot", _peak_reserved(actions, reserved))
    _add_events(builder, actions)
    return builder.build()


def _peak_reserved(actions: list[tuple[str, int, int, int]], at_end: int) -> int:
    """Backwards from the segments that are there at the end."""
    now = peak = at_end
    for action, _, size, _ in reversed(actions):
        if action in _GROWS:
            now -= size
        elif action in _SHRINKS:
            now += size
        peak = max(peak, now)
    return peak


def _add_events(builder: TraceBuilder, actions: list[tuple[str, int, int, int]]) -> None:
    blocks = [one for one in actions if one[0] in ("alloc", "free_completed")]
    first: dict[int, tuple[str, int, int, int]] = {}
    for one in blocks:
        first.setdefault(one[1], one)
    live: set[int] = set()
    for action, address, size, stream in first.values():
        if action == "free_completed":
            builder.allocate(address, size, stream)
            live.add(address)
    for action, address, size, stream in blocks:
        if action == "alloc" and address not in live:
            builder.allocate(address, size, stream)
            live.add(address)
        elif action == "free_completed" and address in live:
            builder.free(address, stream)
            live.discard(address)
