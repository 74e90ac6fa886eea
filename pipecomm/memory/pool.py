"""Tensors over pooled memory: a freed tensor's bytes serve the next one without a system call."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecomm._native import core
from pipecomm.device import as_device
from pipecomm.errors import ConfigError, NotBuiltError
from pipecomm.memory.snapshot import SegmentSnapshot, snapshot_of
from pipecomm.memory.tags import TagStats, stats_by_tag
from pipecomm.torch_half import c10d_build

__all__ = ["MemoryPool", "PoolStats", "default_pool", "tensor_from_block"]

_default_pool: MemoryPool | None = None
_default_pool_lock = threading.Lock()


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds, in bytes, and how often it was asked.

    `live`: in use. `pending`: freed, but a stream may still use it. `reserved`: held from the
    system. `peak_live_nbytes` counts live and pending. `num_remaps`: how often free memory was
    moved together. Peaks are those since the pool was made, or since `reset_peaks`.
    """

    live_nbytes: int
    pending_nbytes: int
    reserved_nbytes: int
    peak_live_nbytes: int
    peak_reserved_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    limit_nbytes: int
    num_segments: int
    num_allocations: int
    num_upstream_calls: int
    num_remaps: int

    @property
    def fragmentation(self) -> float:
        """1 - peak live / peak reserved; 0 for an unused pool."""
        if self.peak_reserved_nbytes == 0:
            return 0.0
        return 1.0 - self.peak_live_nbytes / self.peak_reserved_nbytes


class MemoryPool:
    """A cache of memory for tensors, shared by all threads.

    `limit` bounds the bytes held from the system (None: no limit). Raises ConfigError for a limit
    that is not positive, NotBuiltError for a device other than the CPU.
    """

    def __init__(self, device: str | torch.device = "cpu", limit: int | None = None) -> None:
        if as_device(device).type != "cpu":
            raise NotBuiltError(
                f"expected device 'cpu' for a memory pool; got '{device}'. "
                "Pools on other devices are not implemented; use torch's allocator there."
            )
        self._pool = core.make_host_pool(_limit_nbytes(limit))

    @property
    def limit(self) -> int | None:
        """Most bytes held from the system (None: no limit), for all threads; can be set."""
        return self._pool.limit_nbytes or None

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._pool.limit_nbytes = _limit_nbytes(limit)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor, contents undefined; its memory returns to the pool when it dies.

        Raises ConfigError for a negative dimension, PoolExhaustedError where neither the limit nor
        the machine allows it.
        """
        with contextlib.suppress(TypeError, ValueError):
            if (tensor := self._try_empty(shape, dtype)) is not None:
                return tensor
        if any(not isinstance(size, int) or size < 0 for size in shape):
            raise ConfigError(f"expected whole dimensions of at least 0; got shape {tuple(shape)}")
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"expected a torch.dtype; got {dtype!r}")
        nbytes = math.prod(shape) * dtype.itemsize
        return tensor_from_block(self.allocate(nbytes), shape, dtype)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """torch's own CPU allocations of at least 64 KiB come from this pool inside.

        Those of this thread, and of the threads that run a backward started inside; whatever lives
        on outside stays valid. Nested, the inner pool counts. Where the pool has no memory, torch
        raises torch.OutOfMemoryError. Raises NotBuiltError where the torch half cannot be compiled.
        """
        use = c10d_build.load(torch).TorchPool(self._pool.capsule()).begin_use()
        try:
            yield
        finally:
            use.end()

    @functools.cached_property
    def _try_empty(self) -> Callable[[Any, Any], torch.Tensor | None]:
        """empty() without its checks and errors: None where those are needed, or always."""
        torch_half = c10d_build.load_if_built(torch)
        if torch_half is None:
            return lambda shape, dtype: None
        empty: Callable[[Any, Any], torch.Tensor | None]
        empty = torch_half.TorchPool(self._pool.capsule()).empty
        return empty

    def allocate(self, nbytes: int) -> core.Block:
        """A `_core.Block` of `nbytes` bytes (a writable buffer, 512-byte aligned); as `empty`."""
        if not isinstance(nbytes, int) or not 0 <= nbytes < 2**63:
            raise ConfigError(f"expected a size from 0 to 2**63 - 1 bytes; got {nbytes!r}")
        return self._pool.allocate(nbytes)

    def stats(self) -> PoolStats:
        """The numbers now."""
        return PoolStats(**self._pool.stats())

    def reset_peaks(self) -> None:
        """The peaks of `stats` and `tag_stats` begin anew at what is held now."""
        self._pool.reset_peaks()

    def tag_stats(self) -> dict[str, TagStats]:
        """The memory by what `pipecomm.memory.tag` named when it was allocated."""
        return stats_by_tag(self._pool)

    def snapshot(self) -> list[SegmentSnapshot]:
        """Every segment and block now, by address."""
        return snapshot_of(self._pool)

    def on_exhausted(self, callback: Callable[[int], bool] | None) -> None:
        """Call `callback(nbytes)` before a request fails; True: it has freed some, try again.

        Called by the thread that asks, without a lock of the pool; what it raises, the request
        raises. None: no callback.
        """
        if callback is not None and not callable(callback):
            raise ConfigError(
                f"expected a function of a number of bytes, or None; got {callback!r}"
            )
        self._pool.set_exhausted(callback)

    def trim(self) -> int:
        """Give free memory, in runs of at least 64 KiB, back to the system; return its bytes."""
        return self._pool.trim()

    def check(self) -> None:
        """Walk all blocks; raise RuntimeError where the pool's books are wrong (a bug)."""
        self._pool.check()

    @property
    def core_pool(self) -> core.Pool:
        """The `_core.Pool` behind it, for what else allocates from it."""
        return self._pool


def tensor_from_block(block: core.Block, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The block's bytes as a contiguous CPU tensor that owns the block (zero-copy).

    The block must hold exactly the tensor's bytes.
    """
    if block.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(block, dtype=dtype).view(tuple(shape))


def default_pool() -> MemoryPool:
    """The pool that links use unless given another: one per process, no limit."""
    global _default_pool
    with _default_pool_lock:
        if _default_pool is None:
            _default_pool = MemoryPool()
        return _default_pool


def _limit_nbytes(limit: int | None) -> int:
    if limit is None:
        return 0
    if not isinstance(limit, int) or not 0 < limit < 2**63:
        raise ConfigError(
            f"expected a positive number of bytes, or None, as pool limit; got {limit!r}"
        )
    return limit
