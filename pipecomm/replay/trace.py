"""A trace: allocations and frees in order, as three arrays, and its file."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from pipecomm.errors import ConfigError

__all__ = ["Trace", "TraceBuilder"]

_VERSION = 1
_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Event i allocates `nbytes[i]` bytes as block `ids[i]`, or frees that block (-1).

    int64 arrays of one length; an id may be used again after its free. `streams` matters to
    policies that keep memory by stream. `reported_reserved_nbytes` is the peak that the recorded
    allocator itself reached, where the source tells.
    """

    ids: _Int64s
    nbytes: _Int64s
    streams: _Int64s
    source: str = ""
    reported_reserved_nbytes: int | None = None

    @property
    def num_events(self) -> int:
        return len(self.ids)

    def save(self, file: str | Path | BinaryIO) -> None:
        """Write a compressed .npz file (numpy), which load() reads without unpickling anything."""
        meta = {
            "format": "pipecomm trace",
            "version": _VERSION,
            "source": self.source,
            "reported_reserved_nbytes": self.reported_reserved_nbytes,
        }
        np.savez_compressed(
            file, ids=self.ids, nbytes=self.nbytes, streams=self.streams, meta=json.dumps(meta)
        )

    @classmethod
    def load(cls, file: str | Path | BinaryIO) -> Trace:
        """Read what save() wrote. Raises ConfigError for another file."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                meta = json.loads(str(arrays["meta"]))
                found = [arrays[name] for name in ("ids", "nbytes", "streams")]
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(f"expected a trace that pipecomm saved; got {error}") from error
        if meta.get("format") != "pipecomm trace" or meta.get("version") != _VERSION:
            raise ConfigError(f"expected a pipecomm trace of version {_VERSION}; got {meta}")
        if any(a.dtype != np.int64 or a.shape != found[0].shape or a.ndim != 1 for a in found):
            shapes = [(a.dtype.name, a.shape) for a in found]
            raise ConfigError(f"expected three int64 arrays of one length; got {shapes}")
        ids, nbytes, streams = found
        return cls(ids, nbytes, streams, str(meta["source"]), meta["reported_reserved_nbytes"])


@dataclass
class TraceBuilder:
    """Collects events one by one."""

    source: str = ""
    reported_reserved_nbytes: int | None = None
    _ids: list[int] = field(default_factory=list)
    _nbytes: list[int] = field(default_factory=list)
    _streams: list[int] = field(default_factory=list)

    def allocate(self, block: int, nbytes: int, stream: int = 0) -> None:
        self._add(block, nbytes, stream)

    def free(self, block: int, stream: int = 0) -> None:
        self._add(block, -1, stream)

    def _add(self, block: int, nbytes: int, stream: int) -> None:
        self._ids.append(block)
        self._nbytes.append(nbytes)
        self._streams.append(stream)

    def build(self) -> Trace:
        ids, nbytes, streams = (
            np.array(numbers, np.int64) for numbers in (self._ids, self._nbytes, self._streams)
        )
        return Trace(ids, nbytes, streams, self.source, self.reported_reserved_nbytes)
