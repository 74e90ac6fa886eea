"""Traces written as text: STAlloc's and MiniMalloc's."""

from __future__ import annotations

from collections.abc import Iterable

from pipecomm.errors import ConfigError
from pipecomm.replay.trace import Trace, TraceBuilder

__all__ = ["read_minimalloc", "read_stalloc"]

_MINIMALLOC_COLUMNS = ("id", "lower", "upper", "size")


def read_stalloc(lines: Iterable[str]) -> Trace:
    """One event a line: "1 pointer size stream" allocates, "0 pointer size stream" frees.

    Pointers are decimal or 0x-hexadecimal. A free of what was not allocated in the file is left
    out: recording began later. Raises ConfigError, with the line's number, for anything else.
    """
    builder = TraceBuilder("STAlloc")
    live: set[int] = set()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            kind, pointer, size, stream = (int(word, 0) for word in words)
        except ValueError as error:
            raise ConfigError(
                f"line {number}: expected '1 pointer size stream' or '0 ...'; got {line.strip()!r}"
            ) from error
        if kind == 1 and pointer not in live and size >= 0:
            builder.allocate(pointer, size, stream)
            live.add(pointer)
        elif kind == 0:
            if pointer in live:
                builder.free(pointer, stream)
                live.discard(pointer)
        else:
            raise ConfigError(
                f"line {number}: expected 1 with a pointer that is not live, or 0; got "
                f"{line.strip()!r}"
            )
    return builder.build()


def read_minimalloc(lines: Iterable[str]) -> Trace:
    """A header with id, lower, upper and size in any order, then one buffer a line.

    A buffer lives from time `lower` until before `upper`; at one time frees come first. Raises
    ConfigError, with the line's number, for anything else.
    """
    rows = [line.strip().split(",") for line in lines if line.strip()]
    header = [name.strip() for name in rows[0]] if rows else []
    if any(name not in header for name in _MINIMALLOC_COLUMNS):
        raise ConfigError(f"line 1: expected the columns {_MINIMALLOC_COLUMNS}; got {header}")
    events: list[tuple[int, int, int, int]] = []
    for block, row in enumerate(rows[1:]):
        try:
            lower, upper, size = (int(row[header.index(name)]) for name in _MINIMALLOC_COLUMNS[1:])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"line {block + 2}: expected whole numbers; got {row}") from error
        if upper <= lower or size < 0:
            raise ConfigError(
                f"line {block + 2}: expected lower < upper and a size of at least 0; got {row}"
            )
        events += [(lower, 1, block, size), (upper, 0, block, -1)]
    builder = TraceBuilder("MiniMalloc")
    for _, is_allocation, block, size in sorted(events):
        if is_allocation:
            builder.allocate(block, size)
        else:
            builder.free(block)
    return builder.build()
