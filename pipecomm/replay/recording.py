"""Records traces: what a pool is asked for, and what the CPU tensors of any model take."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipecomm._native import core
from pipecomm.memory import MemoryPool
from pipecomm.replay.trace import Trace, TraceBuilder

__all__ = ["ModelRecorder", "PoolRecorder", "record_model", "record_pool"]


class PoolRecorder:
    """The requests of one pool since it was made; blocks live before do not appear."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool.core_pool
        self._recorder = core.TraceRecorder()
        self._events = np.empty((0, 2), np.int64)
        self._pool.set_recorder(self._recorder)

    def stop(self) -> None:
        self._pool.set_recorder(None)

    def trace(self) -> Trace:
        """What was recorded so far."""
        new = np.frombuffer(self._recorder.take(), np.int64).reshape(-1, 2)
        self._events = np.concatenate([self._events, new])
        ids, nbytes = self._events[:, 0], self._events[:, 1]
        known = _frees_of_known_blocks(ids, nbytes)
        return Trace(
            ids[known].copy(), nbytes[known].copy(), np.zeros(int(known.sum()), np.int64), "pool"
        )


def _frees_of_known_blocks(ids: Any, nbytes: Any) -> Any:
    """All events but frees of blocks that were allocated before."""
    keep = np.ones(len(ids), bool)
    live: set[int] = set()
    for i, (block, size) in enumerate(zip(ids.tolist(), nbytes.tolist(), strict=True)):
        if size >= 0:
            live.add(block)
        elif block in live:
            live.discard(block)
        else:
            keep[i] = False
    return keep


@contextlib.contextmanager
def record_pool(pool: MemoryPool) -> Iterator[PoolRecorder]:
    """Record what `pool` is asked for inside; `trace()` gives it, then and afterwards."""
    recorder = PoolRecorder(pool)
    try:
        yield recorder
    finally:
        recorder.stop()


class ModelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage that an operation makes, until it dies; scratch inside operations is not seen.

    Operations of the autograd threads of a backward are seen where torch runs them under the
    caller's modes, as it does for CPU tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._builder = TraceBuilder("model")
        self._numbers = itertools.count()
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._know(leaf, is_new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._know(leaf, is_new=True)
        return result

    def _know(self, leaf: Any, *, is_new: bool) -> None:
        """Parameters and inputs are there before: what goes in is not an allocation."""
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return
        storage = leaf.untyped_storage()
        if storage in self._known:
            return
        number = next(self._numbers)
        self._known[storage] = number
        if is_new:
            self._builder.allocate(number, storage.nbytes())
            weakref.finalize(storage, self._builder.free, number).atexit = False

    def trace(self) -> Trace:
        """What was recorded so far."""
        return self._builder.build()


def record_model() -> ModelRecorder:
    """`with record_model() as recorder: step()`, then `recorder.trace()`."""
    return ModelRecorder()
