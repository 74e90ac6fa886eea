"""What lies where in a pool, at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipecomm.memory.tags import name_of_tag

__all__ = ["BlockSnapshot", "SegmentSnapshot", "snapshot_of"]


@dataclass(frozen=True)
class BlockSnapshot:
    """A block; `nbytes` is its size, `requested_nbytes` what was asked for (0 where free)."""

    address: int
    nbytes: int
    requested_nbytes: int
    state: str  # "live", "pending" (freed, but a stream may still use it) or "free"
    tag: str | None


@dataclass(frozen=True)
class SegmentSnapshot:
    """Memory in one piece; `kind` is "small" or "large", after the requests it serves."""

    address: int
    nbytes: int
    kind: str
    blocks: list[BlockSnapshot] = field(default_factory=list)


def snapshot_of(core_pool: Any) -> list[SegmentSnapshot]:
    """The segments of a `_core.Pool` by address, each with the blocks that begin in it."""
    segments: list[SegmentSnapshot] = []
    for is_segment, address, nbytes, requested_nbytes, kind, state, number in core_pool.snapshot():
        if is_segment:
            segments.append(SegmentSnapshot(address, nbytes, kind))
        else:
            block = BlockSnapshot(address, nbytes, requested_nbytes, state, name_of_tag(number))
            segments[-1].blocks.append(block)
    return segments
