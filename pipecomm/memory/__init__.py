"""Pooled memory for tensors."""

from pipecomm.memory.pool import MemoryPool, PoolStats, default_pool, tensor_from_block

__all__ = ["MemoryPool", "PoolStats", "default_pool", "tensor_from_block"]
