"""Peaks that begin anew, whom a pool asks before it fails, and what a recorder notes."""

from __future__ import annotations

import pytest
import torch

from pipecomm._native import core
from pipecomm.errors import ConfigError, PoolExhaustedError
from pipecomm.memory import MemoryPool

MIB = 1 << 20


def test_peaks_begin_anew_at_what_is_held() -> None:
    pool = MemoryPool()
    kept = pool.empty((MIB,), torch.uint8)
    pool.empty((64 * MIB,), torch.uint8)
    pool.trim()
    pool.reset_peaks()
    stats = pool.stats()
    assert stats.peak_live_nbytes == kept.nbytes
    assert stats.peak_reserved_nbytes == stats.reserved_nbytes < 3 * MIB
    pool.empty((2 * MIB,), torch.uint8)
    assert pool.stats().peak_live_nbytes == 3 * MIB


def test_exhausted_callback_makes_room_and_is_asked_again() -> None:
    pool = MemoryPool(limit=8 * MIB)
    kept = [pool.empty((2 * MIB,), torch.uint8) for _ in range(4)]
    asked: list[int] = []

    def free_one(nbytes: int) -> bool:
        asked.append(nbytes)
        if kept:
            kept.pop()
        return bool(kept)

    pool.on_exhausted(free_one)
    x = pool.empty((5 * MIB,), torch.uint8)
    assert x.nbytes == 5 * MIB
    assert asked == [5 * MIB] * 3
    asked.clear()
    with pytest.raises(PoolExhaustedError):
        pool.empty((4 * MIB,), torch.uint8)
    assert asked == [4 * MIB]
    pool.on_exhausted(None)
    with pytest.raises(PoolExhaustedError):
        pool.empty((4 * MIB,), torch.uint8)
    assert asked == [4 * MIB]


def test_what_the_callback_raises_the_request_raises() -> None:
    pool = MemoryPool(limit=MIB)

    def fail(nbytes: int) -> bool:
        raise KeyError(nbytes)

    pool.on_exhausted(fail)
    with pytest.raises(KeyError, match=str(2 * MIB)):
        pool.empty((2 * MIB,), torch.uint8)
    pool.check()
    with pytest.raises(ConfigError, match="expected a function"):
        pool.on_exhausted(3)  # type: ignore[arg-type]


def test_recorder_notes_allocations_and_frees() -> None:
    pool = MemoryPool()
    recorder = core.TraceRecorder()
    pool.core_pool.set_recorder(recorder)
    x = pool.empty((100,), torch.uint8)
    address = x.data_ptr()
    del x
    pool.core_pool.set_recorder(None)
    pool.empty((5,), torch.uint8)
    numbers = memoryview(recorder.take()).cast("q").tolist()
    assert numbers == [address, 100, address, -1]
    assert recorder.take() == b""
