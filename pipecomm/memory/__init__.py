"""Pooled memory for tensors."""

from pipecomm.memory.pool import MemoryPool, PoolStats, default_pool, tensor_from_block
from pipecomm.memory.snapshot import BlockSnapshot, SegmentSnapshot
from pipecomm.memory.tags import TagStats, tag

__all__ = [
    "BlockSnapshot",
    "MemoryPool",
    "PoolStats",
    "SegmentSnapshot",
    "TagStats",
    "default_pool",
    "tag",
    "tensor_from_block",
]
