"""MemoryPool: tensors over pooled memory, limits, errors, threads, process exit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomm.errors import ConfigError, NotBuiltError, PoolExhaustedError
from pipecomm.memory.pool import MemoryPool, default_pool, tensor_from_block
from tests.patience import patient

MIB = 1 << 20

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def memfd_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pipecomm")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_in_threads(num_threads: int, fn: Callable[[int], None]) -> None:
    """Runs fn(index) in threads; re-raises the first error any of them raised."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            fn(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=patient(60))
        assert not thread.is_alive(), "a thread did not finish in 60 s"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_gives_an_aligned_contiguous_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    pool = MemoryPool()
    x = pool.empty((3, 5, 7), dtype)
    assert x.shape == (3, 5, 7)
    assert x.dtype == dtype
    assert x.is_contiguous()
    assert x.data_ptr() % 512 == 0
    assert pool.stats().live_nbytes == 105 * dtype.itemsize
    raw = x.view(torch.uint8)
    raw.fill_(1)
    assert int(raw.sum()) == raw.numel()


@pytest.mark.parametrize("shape", [(0,), (4, 0, 2), (0, 0)])
def test_empty_with_a_zero_dimension_gives_an_empty_tensor(shape: tuple[int, ...]) -> None:
    x = MemoryPool().empty(shape, torch.bfloat16)
    assert x.shape == shape
    assert x.dtype == torch.bfloat16


def test_empty_without_dimensions_gives_a_scalar() -> None:
    x = MemoryPool().empty((), torch.float64)
    x.fill_(2.5)
    assert x.item() == 2.5


def test_dead_tensor_gives_its_memory_to_the_next_one_without_upstream() -> None:
    pool = MemoryPool()
    address = pool.empty((1000, 100), torch.float32).data_ptr()
    before = pool.stats()
    assert before.live_nbytes == 0
    for _ in range(100):
        assert pool.empty((1000, 100), torch.float32).data_ptr() == address
    assert pool.stats().num_upstream_calls == before.num_upstream_calls == 1


def test_view_keeps_the_memory_of_a_dead_tensor() -> None:
    pool = MemoryPool()
    x = pool.empty((4, 100), torch.int64)
    x.copy_(torch.arange(400).view(4, 100))
    row = x[2]
    del x
    other = pool.empty((4, 100), torch.int64).fill_(-1)
    assert torch.equal(row, torch.arange(200, 300))
    assert other.data_ptr() != row.data_ptr()
    del row
    assert pool.stats().live_nbytes == other.nbytes


def test_tensor_outlives_its_pool_and_then_frees_everything() -> None:
    mappings, files = memfd_mappings(), open_files()
    x = MemoryPool().empty((1000,), torch.float32)
    x.fill_(3)
    assert float(x.sum()) == 3000
    assert memfd_mappings() > mappings
    del x
    assert memfd_mappings() == mappings
    assert open_files() == files


def test_tensor_takes_part_in_autograd() -> None:
    pool = MemoryPool()
    x = pool.empty((8, 4), torch.float32)
    x.normal_().requires_grad_()
    torch.autograd.backward((x * x).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())


def test_tensor_from_block_shares_the_bytes_and_owns_the_block() -> None:
    pool = MemoryPool()
    block = pool.allocate(24)
    memoryview(block)[:] = bytes(range(24))
    x = tensor_from_block(block, (2, 3), torch.int32)
    del block
    assert pool.stats().live_nbytes == 24
    assert bytes(x.view(torch.uint8).flatten().tolist()) == bytes(range(24))
    del x
    assert pool.stats().live_nbytes == 0


def test_tensor_from_block_of_other_size_is_refused() -> None:
    with pytest.raises(RuntimeError):
        tensor_from_block(MemoryPool().allocate(24), (2, 4), torch.int32)


@pytest.mark.parametrize("shape", [(-1,), (3, -2), (2**63,), (2**40, 2**40)])
def test_shape_that_no_memory_can_hold_is_a_value_error(shape: tuple[int, ...]) -> None:
    pool = MemoryPool()
    with pytest.raises(ConfigError) as caught:
        pool.empty(shape, torch.uint8)
    assert isinstance(caught.value, ValueError)
    pool.check()


@pytest.mark.parametrize("nbytes", [2**40, 2**50, 2**62, 2**63 - 1])
@pytest.mark.parametrize("limit", [None, 64 * MIB])
def test_huge_request_raises_memory_error_and_leaves_the_pool_usable(
    nbytes: int, limit: int | None
) -> None:
    pool = MemoryPool(limit=limit)
    with pytest.raises(PoolExhaustedError, match=str(nbytes)) as caught:
        pool.empty((nbytes,), torch.uint8)
    assert isinstance(caught.value, MemoryError)
    pool.check()
    assert pool.empty((10,), torch.uint8).numel() == 10


def test_exhausted_error_names_the_numbers_and_advises_a_limit_only_with_one() -> None:
    pool = MemoryPool(limit=8 * MIB)
    kept = [pool.empty((MIB,), torch.uint8) for _ in range(8)]
    with pytest.raises(PoolExhaustedError) as caught:
        pool.empty((3 * MIB,), torch.uint8)
    text = str(caught.value)
    for expected in (
        "expected 3145728 bytes",
        "8388608 bytes (8 MiB) live",
        "8388608 bytes (8 MiB) reserved",
        "largest free block 0 bytes",
        "limit 8388608 bytes",
        "Raise the pool's limit, or keep fewer blocks live",
    ):
        assert expected in text
    del kept
    with pytest.raises(PoolExhaustedError) as caught:
        MemoryPool().empty((2**45,), torch.uint8)
    assert "Raise" not in str(caught.value)
    assert "available on this machine" in str(caught.value)


def test_limit_set_in_one_thread_holds_in_all() -> None:
    pool = MemoryPool()
    pool.limit = 32 * MIB
    tensors: list[torch.Tensor] = []
    texts: list[str] = []

    def ask(_: int) -> None:
        assert pool.limit == 32 * MIB
        try:
            tensors.append(pool.empty((10 * MIB,), torch.uint8))
        except PoolExhaustedError as error:
            texts.append(str(error))

    run_in_threads(4, ask)
    assert len(tensors) == 3
    assert len(texts) == 1
    assert "limit 33554432 bytes" in texts[0]


def test_limit_can_be_raised_and_lifted() -> None:
    pool = MemoryPool(limit=2 * MIB)
    with pytest.raises(PoolExhaustedError):
        pool.empty((3 * MIB,), torch.uint8)
    pool.limit = 4 * MIB
    x = pool.empty((3 * MIB,), torch.uint8)
    pool.limit = None
    assert pool.limit is None
    y = pool.empty((30 * MIB,), torch.uint8)
    assert pool.stats().live_nbytes == x.nbytes + y.nbytes


@pytest.mark.parametrize("limit", [0, -1, 2**63])
def test_limit_that_is_not_a_positive_size_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match=str(limit)):
        MemoryPool(limit=limit)
    pool = MemoryPool(limit=MIB)
    with pytest.raises(ConfigError, match=str(limit)):
        pool.limit = limit
    assert pool.limit == MIB


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("meta")])
def test_pool_on_another_device_is_not_built(device: str | torch.device) -> None:
    with pytest.raises(NotBuiltError, match=str(device)):
        MemoryPool(device)


def test_trim_gives_unused_memory_back_and_keeps_what_is_live() -> None:
    pool = MemoryPool()
    mappings = memfd_mappings()
    kept = pool.empty((MIB,), torch.uint8).fill_(7)
    pool.empty((100 * MIB,), torch.uint8)
    assert pool.trim() == 101 * MIB
    assert pool.stats().reserved_nbytes == MIB
    assert int(kept.sum()) == 7 * MIB
    del kept
    assert pool.trim() == MIB
    assert memfd_mappings() == mappings
    assert pool.trim() == 0


def test_stats_add_up_and_are_frozen() -> None:
    pool = MemoryPool()
    assert pool.stats().fragmentation == 0.0
    x = pool.empty((1000,), torch.uint8)
    stats = pool.stats()
    assert stats.live_nbytes == stats.peak_live_nbytes == 1000
    assert stats.reserved_nbytes == stats.peak_reserved_nbytes == 2 * MIB
    assert stats.free_nbytes == stats.largest_free_nbytes == 2 * MIB - 1024
    assert (stats.num_allocations, stats.num_segments, stats.num_upstream_calls) == (1, 1, 1)
    assert stats.fragmentation == pytest.approx(1 - 1000 / (2 * MIB))
    del x
    assert pool.stats().live_nbytes == 0
    assert pool.stats().peak_live_nbytes == 1000
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.live_nbytes = 1  # type: ignore[misc]


def test_equal_steps_take_nothing_from_upstream_after_the_first() -> None:
    pool = MemoryPool()

    def step() -> None:
        in_flight = [pool.empty((n, 64), torch.float32) for n in (1, 500, 30, 9000, 500, 20000)]
        while len(in_flight) > 1:
            in_flight.append(pool.empty((len(in_flight), 1000), torch.bfloat16))
            del in_flight[:2]

    step()
    first = pool.stats()
    for _ in range(50):
        step()
    assert pool.stats().num_upstream_calls == first.num_upstream_calls
    assert pool.stats().peak_reserved_nbytes == first.peak_reserved_nbytes


def test_pools_made_and_dropped_leave_no_memory_behind() -> None:
    mappings, files = memfd_mappings(), open_files()
    for i in range(100):
        pool = MemoryPool()
        x = pool.empty((16 * MIB,), torch.uint8)
        x[::4096] = 1
        if i % 2 == 0:
            del x
            pool.trim()
    del pool, x
    assert memfd_mappings() == mappings
    assert open_files() == files


def test_threads_free_each_others_tensors_and_none_overlap() -> None:
    pool = MemoryPool()
    shared: list[tuple[torch.Tensor, int]] = []

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for i in range(400):
            numel = int(torch.randint(1, 1 << 14, (1,), generator=generator))
            mark = index * 1000 + i
            shared.append((pool.empty((numel,), torch.int32).fill_(mark), mark))
            tensor, expected = shared.pop(0)
            assert bool((tensor == expected).all())

    run_in_threads(4, work)
    shared.clear()
    pool.check()
    assert pool.stats().live_nbytes == 0


def test_default_pool_is_one_for_all_threads() -> None:
    pools: list[MemoryPool] = []
    run_in_threads(8, lambda _: pools.append(default_pool()))
    assert len({id(pool) for pool in pools}) == 1
    assert default_pool() is pools[0]
    assert default_pool().limit is None


EXITS = {"return": ("", 0), "sys.exit": ("sys.exit(0)", 0), "exception": ("raise ValueError", 1)}


@pytest.mark.parametrize(
    ("how", "with_thread"),
    [("return", False), ("return", True), ("sys.exit", True), ("exception", True)],
)
def test_process_with_live_tensors_exits_without_a_signal(how: str, with_thread: bool) -> None:
    last_line, expected = EXITS[how]
    program = textwrap.dedent(f"""
        import sys, threading, torch
        from pipecomm.memory.pool import MemoryPool, default_pool
        pool, kept = MemoryPool(limit=1 << 28), []
        tensor = default_pool().empty((1000,), torch.float32)
        cycle = [pool.empty((1000,), torch.float32)]
        cycle.append(cycle)
        def work():
            while True:
                # Not a tensor: torch itself may not be in use by a daemon thread at exit.
                kept.append(pool.allocate(3 << 20))
                if len(kept) > 20:
                    kept.clear()
                    pool.trim()
        if {with_thread}:
            threading.Thread(target=work, daemon=True).start()
            while not kept:
                pass
        {last_line}
    """)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=patient(60)
    )
    assert result.returncode == expected, result.stderr.decode()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pool: MemoryPool("nowhere"), "'nowhere'"),
        (lambda pool: MemoryPool(None), "None"),
        (lambda pool: MemoryPool(limit=1.5), "1.5"),
        (lambda pool: MemoryPool(limit="1"), "'1'"),
        (lambda pool: pool.empty(("a",), torch.float32), "'a'"),
        (lambda pool: pool.empty((1.5,), torch.float32), "1.5"),
        (lambda pool: pool.empty((1,), "float32"), "'float32'"),
        (lambda pool: pool.allocate("1"), "'1'"),
    ],
)
def test_argument_of_the_wrong_kind_is_refused_in_words(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"expected .*{text}"):
        call(MemoryPool())
