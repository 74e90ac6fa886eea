"""Reads a trace from a file of any known format, told apart by its first bytes."""

from __future__ import annotations

import io
from pathlib import Path

from pipecomm.errors import ConfigError
from pipecomm.replay.text_formats import read_minimalloc, read_stalloc
from pipecomm.replay.torch_snapshot import load_plain_pickle, trace_from_snapshot
from pipecomm.replay.trace import Trace

__all__ = ["load_trace"]


def load_trace(path: str | Path) -> Trace:
    """Read a trace: pipecomm's own, torch's memory snapshot, STAlloc's text, MiniMalloc's CSV.

    Raises ConfigError for a file that cannot be read, or is none of these.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"expected a trace that can be read; got {error}") from error
    if content.startswith(b"PK"):
        return Trace.load(io.BytesIO(content))
    if content.startswith(b"\x80"):
        return trace_from_snapshot(load_plain_pickle(io.BytesIO(content)))
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        lines = []
    first = next((line for line in lines if line.strip()), "")
    if "," in first:
        return read_minimalloc(lines)
    if first.split()[:1] in (["0"], ["1"]):
        return read_stalloc(lines)
    raise ConfigError(
        f"expected a pipecomm trace, a torch memory snapshot, STAlloc's text or MiniMalloc's CSV; "
        f"got {str(path)!r}, which begins with {content[:20]!r}"
    )
