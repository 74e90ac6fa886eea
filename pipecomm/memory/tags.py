"""Names for what a thread allocates, so that a pool's memory can be told apart by its use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipecomm._native import core
from pipecomm.errors import ConfigError

__all__ = ["TagStats", "name_of_tag", "stats_by_tag", "tag"]

_numbers: dict[str, int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class TagStats:
    """Bytes of one tag: live ones include those that a stream may still use."""

    live_nbytes: int
    peak_live_nbytes: int
    num_allocations: int


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """What this thread allocates inside counts for `name`, in every pool; nested, the inner counts.

    Raises ConfigError for more names in one process than there is room for (255).
    """
    before = core.set_thread_tag(_number_of(name))
    try:
        yield
    finally:
        core.set_thread_tag(before)


def _number_of(name: str) -> int:
    with _lock:
        if name not in _numbers:
            if len(_numbers) + 1 >= core.num_tags():
                raise ConfigError(
                    f"expected at most {core.num_tags() - 1} tags in a process; got one more, "
                    f"{name!r}; use fewer names, without numbers that go on"
                )
            _numbers[name] = len(_numbers) + 1
        return _numbers[name]


def name_of_tag(number: int) -> str | None:
    """None for memory without a tag."""
    with _lock:
        return next((name for name, own in _numbers.items() if own == number), None)


def stats_by_tag(core_pool: Any) -> dict[str, TagStats]:
    """Of the tags that have ever been used in this `_core.Pool`."""
    with _lock:
        numbers = dict(_numbers)
    stats = {name: TagStats(*core_pool.tag_stats(number)) for name, number in numbers.items()}
    return {name: one for name, one in stats.items() if one.num_allocations}
