"""MemoryPool.empty: the quick way through the torch half and the long one are the same."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from pipecomm._native import core
from pipecomm.errors import ConfigError
from pipecomm.memory import MemoryPool, tag
from tests.memory.test_pool import run_in_threads

MIB = 1 << 20


@pytest.fixture
def without_torch_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecomm.memory.pool.c10d_build.load_if_built", lambda _: None)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), [2, 3], torch.Size([4, 1])])
def test_empty_without_the_torch_half_is_the_same(
    shape: Any, request: pytest.FixtureRequest
) -> None:
    made = [MemoryPool().empty(shape, torch.float32)]
    request.getfixturevalue("without_torch_half")
    slow = MemoryPool()
    made.append(slow.empty(shape, torch.float32))
    for x in made:
        assert x.shape == tuple(shape)
        assert x.is_contiguous()
        assert not x.requires_grad
        assert x.device == torch.device("cpu")
    assert slow.stats().live_nbytes == made[1].nbytes


def test_empty_keeps_no_python_object_and_counts_tags() -> None:
    pool = MemoryPool()
    with tag("empty"):
        x = pool.empty((70_000,), torch.int16)
    assert pool.tag_stats()["empty"].live_nbytes == 140_000
    blocks = [one for one in gc.get_referents(x) if isinstance(one, core.Block)]
    assert not blocks
    assert x._base is None  # not a view of anything


def test_empty_can_be_resized_and_then_lies_in_torchs_memory() -> None:
    pool = MemoryPool()
    x = pool.empty((100,), torch.int64).copy_(torch.arange(100))
    x.resize_(1000)
    assert pool.stats().live_nbytes == 0
    assert torch.equal(x[:100], torch.arange(100))


def test_empty_in_inference_mode_is_an_inference_tensor() -> None:
    with torch.inference_mode():
        assert MemoryPool().empty((3,), torch.float32).is_inference()


@pytest.mark.parametrize("shape", [3, None, "ab", (1.5,), ("3",)])
@pytest.mark.parametrize("dtype", [torch.float32, "float32", None])
def test_empty_refuses_what_is_no_shape_or_dtype(shape: Any, dtype: Any) -> None:
    with pytest.raises((ConfigError, TypeError)):
        MemoryPool().empty(shape, dtype)


def test_callback_of_an_exhausted_pool_may_raise_and_empty_raises_that() -> None:
    pool = MemoryPool(limit=MIB)

    def fail(nbytes: int) -> bool:
        raise KeyError(nbytes)

    pool.on_exhausted(fail)
    with pytest.raises(KeyError, match=str(2 * MIB)):
        pool.empty((2 * MIB,), torch.uint8)


def test_callback_can_be_changed_while_others_free() -> None:
    pool = MemoryPool()

    def work(index: int) -> None:
        for _ in range(300):
            if index == 0:
                pool.on_exhausted(lambda nbytes: False)
            else:
                pool.empty((2 * MIB,), torch.uint8)

    run_in_threads(2, work)
