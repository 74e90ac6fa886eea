"""Traces recorded from a pool and from a model."""

from __future__ import annotations

import gc

import torch

from pipecomm.memory import MemoryPool
from pipecomm.replay.compare import compare
from pipecomm.replay.recording import record_model, record_pool


def test_pools_requests_and_frees_are_recorded_while_asked_for() -> None:
    pool = MemoryPool()
    before = pool.empty((100,), torch.uint8)
    with record_pool(pool) as recorder:
        x = pool.empty((1000,), torch.uint8)
        y = pool.empty((2 << 20,), torch.uint8)
        del before  # was there before: no event
        del x
        again = pool.empty((1000,), torch.uint8)
    pool.empty((7,), torch.uint8)
    trace = recorder.trace()
    assert trace.nbytes.tolist() == [1000, 2 << 20, -1, 1000]
    assert trace.ids[0] == trace.ids[2]
    assert compare(trace, []).peak_live_nbytes == (2 << 20) + 1000
    assert recorder.trace().num_events == 4
    del y, again


def test_blocks_that_outlive_the_recording_stay_live_in_it() -> None:
    pool = MemoryPool()
    with record_pool(pool) as recorder:
        x = pool.empty((5000,), torch.uint8)
    del x
    assert recorder.trace().nbytes.tolist() == [5000]


def test_models_tensors_are_recorded_until_they_die() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)
    with record_model() as recorder:
        y = torch.relu(x @ weight)
        y.sum().backward()
        del y
    gc.collect()
    trace = recorder.trace()
    sizes = trace.nbytes.tolist()
    assert sizes.count(32 * 64 * 4) >= 2  # the product, what relu gives, their gradients
    assert 64 * 64 * 4 in sizes  # the gradient of the weight
    assert sizes.count(-1) == sum(size >= 0 for size in sizes) - 1  # which alone is left
    assert weight.grad is not None


def test_views_and_inputs_are_no_allocations() -> None:
    x = torch.randn(8, 8)
    with record_model() as recorder:
        x.view(64).add_(1)
        x.t()
    assert recorder.trace().num_events == 0
