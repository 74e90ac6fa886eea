"""A forked child: what it writes into pooled memory, its parent never sees."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable

import pytest
import torch

from pipecomm._native import core
from pipecomm.errors import PoolExhaustedError
from pipecomm.memory import MemoryPool
from tests.patience import patient

MIB = 1 << 20


def run_in_child(work: Callable[[], None]) -> None:
    """Fork; the child runs `work`, in 60 s at most, and ends without Python's clean-up."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(int(patient(60)))
        torch.set_num_threads(1)  # OpenMP's threads stayed with the parent
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_child_reads_its_parents_tensors_and_writes_into_copies() -> None:
    pool = MemoryPool()
    tensors = [pool.empty((n,), torch.uint8).fill_(n % 100) for n in (1000, 70_000, 3 * MIB)]
    freed = pool.empty((500_000,), torch.uint8)
    del freed

    def work() -> None:
        for x in tensors:
            assert bool((x == x.numel() % 100).all())
            x.fill_(200)
        for _ in range(20):
            pool.empty((500_000,), torch.uint8).fill_(201)
        more = [pool.empty((4 * MIB,), torch.uint8).fill_(202) for _ in range(4)]
        pool.check()
        del more
        pool.trim()

    run_in_child(work)
    fresh = [pool.empty((4 * MIB,), torch.uint8).fill_(7) for _ in range(4)]
    for x in tensors:
        assert bool((x == x.numel() % 100).all())
    assert all(bool((x == 7).all()) for x in fresh)
    pool.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parents_memory_outlives_a_child_that_frees_it() -> None:
    pool = MemoryPool()
    tensors = [pool.empty((2 * MIB,), torch.uint8).fill_(i) for i in range(8)]

    def work() -> None:
        tensors.clear()
        assert pool.trim() >= 16 * MIB
        again = pool.empty((32 * MIB,), torch.uint8).fill_(9)
        assert int(again[-1]) == 9

    run_in_child(work)
    for i, x in enumerate(tensors):
        assert bool((x == i).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_moved_memory_stays_apart_in_a_child() -> None:
    pool = MemoryPool(limit=16 * MIB)
    tensors = [pool.empty((MIB,), torch.uint8).fill_(i) for i in range(16)]

    def leave_every_other() -> None:
        for i in range(0, 16, 2):
            tensors[i] = torch.empty(0)

    def work() -> None:
        leave_every_other()
        pool.empty((8 * MIB,), torch.uint8).fill_(99)
        assert all(bool((tensors[i] == i).all()) for i in range(1, 16, 2))

    run_in_child(work)
    assert all(bool((x == i).all()) for i, x in enumerate(tensors))
    leave_every_other()
    pool.empty((8 * MIB,), torch.uint8).fill_(98)
    assert pool.stats().num_remaps > 0
    run_in_child(work)
    assert all(bool((tensors[i] == i).all()) for i in range(1, 16, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_threads_use_the_pool_leaves_the_child_a_whole_one() -> None:
    pool = MemoryPool(limit=64 * MIB)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            kept = []
            try:
                for nbytes in (100, 100_000, 3 * MIB, 5 * MIB):
                    kept.append(pool.allocate(nbytes))
            except PoolExhaustedError:
                pass
            kept.clear()
            pool.trim()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            run_in_child(lambda: (pool.check(), pool.allocate(1000), None)[2])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    pool.check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lazy_pool_works_in_a_child() -> None:
    pool = core.make_lazy_pool()
    block = pool.allocate(MIB)
    memoryview(block)[:4] = b"abcd"

    def work() -> None:
        memoryview(block)[:4] = b"wxyz"
        pool.allocate(8 * MIB)

    run_in_child(work)
    assert bytes(memoryview(block)[:4]) == b"abcd"
