"""What a pool tells of itself: peaks, tags, a snapshot; and whom it asks before it fails."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from pipecomm._native import core
from pipecomm.errors import ConfigError, PoolExhaustedError
from pipecomm.memory import MemoryPool, tag
from tests.patience import patient

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


def test_memory_is_counted_by_the_tag_it_was_allocated_under() -> None:
    pool = MemoryPool()
    with tag("activations"):
        x = pool.empty((3000,), torch.uint8)
        with tag("scratch"):
            pool.empty((500,), torch.uint8)
        y = pool.empty((1000,), torch.uint8)
    pool.empty((7,), torch.uint8)
    stats = pool.tag_stats()
    assert stats["activations"].live_nbytes == 4000
    assert stats["activations"].num_allocations == 2
    assert stats["scratch"].live_nbytes == 0
    assert stats["scratch"].peak_live_nbytes == 500
    del x
    assert pool.tag_stats()["activations"].live_nbytes == 1000
    assert pool.tag_stats()["activations"].peak_live_nbytes == 4000
    pool.reset_peaks()
    assert pool.tag_stats()["activations"].peak_live_nbytes == 1000
    assert set(MemoryPool().tag_stats()) == set()
    del y


def fail_under_a_tag(pool: MemoryPool) -> None:
    with tag("main"):
        thread = threading.Thread(target=lambda: pool.empty((5,), torch.uint8))
        thread.start()
        thread.join()
        raise KeyError


def test_tag_is_of_its_thread_and_ends_with_an_error() -> None:
    pool = MemoryPool()
    with pytest.raises(KeyError):
        fail_under_a_tag(pool)
    pool.empty((5,), torch.uint8)
    assert "main" not in pool.tag_stats()


def test_more_tags_than_there_is_room_for_are_refused() -> None:
    program = textwrap.dedent("""
        from pipecomm.errors import ConfigError
        from pipecomm.memory import tag
        for i in range(255):
            with tag(str(i)):
                pass
        try:
            with tag("one more"):
                pass
        except ConfigError as error:
            print(error)
        with tag("7"):
            print("known")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60)
    )
    assert "expected at most 255 tags" in done.stdout
    assert done.stdout.endswith("known\n")


def test_snapshot_has_every_byte_once() -> None:
    pool = MemoryPool()
    with tag("kept"):
        kept = pool.empty((1000,), torch.uint8)
    large = pool.empty((3 * MIB,), torch.uint8)
    freed = pool.empty((5000,), torch.uint8)
    address = freed.data_ptr()
    del freed
    segments = pool.snapshot()
    assert [segment.kind for segment in sorted(segments, key=lambda s: s.nbytes)] == [
        *("small", "large")
    ]
    for segment in segments:
        assert sum(block.nbytes for block in segment.blocks) == segment.nbytes
    blocks = {block.address: block for segment in segments for block in segment.blocks}
    own = blocks[kept.data_ptr()]
    assert (own.nbytes, own.requested_nbytes, own.state, own.tag) == (1024, 1000, "live", "kept")
    assert blocks[large.data_ptr()].requested_nbytes == 3 * MIB
    assert blocks[large.data_ptr()].tag is None
    assert (blocks[address].state, blocks[address].requested_nbytes) == ("free", 0)
    assert sum(segment.nbytes for segment in segments) == pool.stats().reserved_nbytes


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
