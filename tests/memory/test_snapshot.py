"""A pool's snapshot."""

from __future__ import annotations

import torch

from pipecomm.memory import MemoryPool, tag

MIB = 1 << 20


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
