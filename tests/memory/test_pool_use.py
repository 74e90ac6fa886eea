"""MemoryPool.use(): torch's own allocations in the pool, by thread, and what outlives the scope."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from pipecomm.memory import MemoryPool, tag
from tests.memory.test_fork import run_in_child
from tests.patience import patient

KIB = 1 << 10
MIB = 1 << 20


def live(pool: MemoryPool) -> int:
    return pool.stats().live_nbytes


def test_large_tensors_of_operations_lie_in_the_pool_and_small_ones_do_not() -> None:
    pool = MemoryPool()
    with pool.use():
        x = torch.ones(MIB // 4)
        assert live(pool) == MIB
        y = x + 1
        assert live(pool) == 2 * MIB
        small = [torch.ones(64 * KIB - 1, dtype=torch.uint8) for _ in range(9)]
        assert live(pool) == 2 * MIB
        edge = torch.ones(64 * KIB, dtype=torch.uint8)
        assert live(pool) == 2 * MIB + edge.nbytes
    outside = torch.ones(MIB // 4)
    assert live(pool) == 2 * MIB + edge.nbytes
    assert torch.equal(y, outside * 2)
    del x, y, edge, small
    assert live(pool) == 0
    pool.check()


def test_only_the_thread_inside_uses_the_pool() -> None:
    pool = MemoryPool()
    kept: list[torch.Tensor] = []
    with pool.use():
        thread = threading.Thread(target=lambda: kept.append(torch.ones(MIB)))
        thread.start()
        thread.join(patient(60))
        assert len(kept) == 1
        assert live(pool) == 0


def test_nested_the_inner_pool_counts_and_an_error_ends_the_scope() -> None:
    outer, inner = MemoryPool(), MemoryPool()
    kept = []

    def fail_inside() -> None:
        with outer.use():
            with inner.use():
                kept.append(torch.ones(MIB, dtype=torch.uint8))
            kept.append(torch.ones(2 * MIB, dtype=torch.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    kept.append(torch.ones(MIB))
    assert (live(inner), live(outer)) == (MIB, 2 * MIB)


class Notes(torch.autograd.Function):
    """Passes on; its backward notes what `look` gives, and may start a backward of its own."""

    look: Callable[[], Any]
    notes: list[Any]
    depth = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Notes.notes.append((threading.get_native_id(), Notes.look()))
        if Notes.depth > 0:
            Notes.depth -= 1
            with torch.enable_grad():
                inner = torch.ones(2, requires_grad=True)
                Notes.apply(inner).sum().backward()  # type: ignore[no-untyped-call]
        return gradient


def test_backward_uses_it_also_on_threads_of_its_own() -> None:
    pool = MemoryPool()
    Notes.notes, Notes.depth = [], 70  # deeper than torch lets one thread go

    def taken() -> int:
        before = live(pool)
        x = torch.ones(MIB, dtype=torch.uint8)
        return live(pool) - before if x.numel() else 0

    Notes.look = taken
    x = torch.ones(4, requires_grad=True)
    y = Notes.apply(x).sum()  # type: ignore[no-untyped-call]
    with pool.use():
        y.backward()
    assert [nbytes for _, nbytes in Notes.notes] == [MIB] * 71
    assert len({thread for thread, _ in Notes.notes}) > 1
    assert live(pool) == 0


def test_gradients_are_those_without_it() -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(8)
        )
        x = torch.randn(4, 3, 32, 32)
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = train()
    pool = MemoryPool()
    for _ in range(2):
        with pool.use():
            found = train()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert pool.stats().num_allocations > 0
    del found
    pool.check()


def test_views_of_numpy_pickles_and_files_hold_the_values() -> None:
    pool = MemoryPool()
    with pool.use():
        x = torch.arange(100_000)
        array = x.numpy()
        copy = pickle.loads(pickle.dumps(x))
        file = io.BytesIO()
        torch.save(x, file)
    del x
    assert live(pool) >= array.nbytes
    assert array.sum() == 99_999 * 50_000
    file.seek(0)
    assert torch.equal(torch.load(file), copy)
    del array, copy
    assert live(pool) == 0


def test_resized_outside_it_leaves_the_pool_with_its_values() -> None:
    pool = MemoryPool()
    with pool.use():
        x = torch.arange(100_000)
        x.resize_(200_000)
        assert live(pool) == 1_600_000
    x.resize_(400_000)
    assert live(pool) == 0
    assert torch.equal(x[:100_000], torch.arange(100_000))


def test_shared_memory_takes_it_out_of_the_pool() -> None:
    pool = MemoryPool()
    with pool.use():
        x = torch.arange(100_000).share_memory_()
    assert x.is_shared()
    assert torch.equal(x, torch.arange(100_000))
    assert live(pool) == 0


def test_tags_and_limit_hold_and_the_callback_is_asked() -> None:
    pool = MemoryPool(limit=8 * MIB)
    with pool.use(), tag("use"):
        kept = [torch.ones(4 * MIB, dtype=torch.uint8)]
        assert pool.tag_stats()["use"].live_nbytes == 4 * MIB
        with pytest.raises(torch.OutOfMemoryError, match="limit 8388608 bytes"):
            torch.ones(6 * MIB, dtype=torch.uint8)
        pool.on_exhausted(lambda nbytes: kept.pop() is not None)
        x = torch.ones(6 * MIB, dtype=torch.uint8)
    assert not kept
    assert live(pool) == x.nbytes


def test_profiler_sees_it() -> None:
    pool = MemoryPool()
    with torch.profiler.profile(profile_memory=True) as profile, pool.use():
        x = torch.ones(MIB)
    assert sum(event.self_cpu_memory_usage for event in profile.key_averages()) >= x.nbytes


def test_scope_and_profiler_need_not_nest() -> None:
    pool = MemoryPool()
    profile = torch.profiler.profile(profile_memory=True)
    with pool.use():
        profile.start()
        x = torch.ones(MIB)
    profile.stop()
    assert live(pool) == x.nbytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_child_writes_into_memory_of_its_own() -> None:
    pool = MemoryPool()
    with pool.use():
        x = torch.full((MIB,), 7, dtype=torch.uint8)

        def work() -> None:
            x.fill_(9)
            y = torch.full((MIB,), 9, dtype=torch.uint8)  # the child's thread is inside too
            assert live(pool) == 2 * MIB
            del y
            assert live(pool) == MIB

        run_in_child(work)
        y = torch.full((MIB,), 3, dtype=torch.uint8)
    assert bool((x == 7).all())
    assert bool((y == 3).all())


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50_000,), float(index**2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_give_what_they_made(method: str) -> None:
    pool = MemoryPool()
    with pool.use():
        loader = DataLoader(
            Squares(), batch_size=3, num_workers=1, multiprocessing_context=method, timeout=100
        )
        batches = list(loader)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1, 4], [9, 16, 25]]
    assert bool((batches[1][2] == 25).all())


def test_process_ends_well_with_tensors_and_a_scope_left_open() -> None:
    code = """
        import threading, torch
        from pipecomm.memory import MemoryPool
        pool = MemoryPool()
        scope = pool.use()
        scope.__enter__()
        kept = torch.ones(1 << 20)
        model = torch.nn.Conv2d(3, 64, 3)
        model(torch.ones(1, 3, 256, 256)).sum().backward()
        hidden = threading.local()
        hidden.x = torch.ones(1 << 20)
        print(pool.stats().live_nbytes >= kept.nbytes)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_oneDNN_frees_what_it_took_inside_also_outside() -> None:
    pool = MemoryPool()
    model = torch.nn.Conv2d(8, 32, 3)
    x = torch.ones(2, 8, 128, 128)
    expected = model(x)
    with pool.use():
        packed = torch._C._nn.mkldnn_reorder_conv2d_weight(
            torch.ones(256, 256, 3, 3).to_mkldnn(), 1, 1, 1, 1, [1, 256, 32, 32]
        )
        assert torch.equal(model(x), expected)
        assert live(pool) > 0
    del packed
    model(x)
    pool.check()
