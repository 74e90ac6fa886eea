"""The pool over each upstream under random histories of takes, frees and trims."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipecomm._native import core
from pipecomm.errors import PoolExhaustedError
from pipecomm.memory.pool import PoolStats

MIB = 1 << 20


class PoolMachine(RuleBasedStateMachine):
    """Random takes, frees and trims under a limit: no overlap, no lost byte, books that add up."""

    def make_pool(self) -> Any:
        return core.make_host_pool(limit_nbytes=16 * MIB)

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.make_pool()
        self.live: list[tuple[Any, int]] = []
        self.num_taken = 0

    @rule(units=st.integers(0, 40), unit=st.sampled_from([1, 511, 4096, 100_000, MIB // 2]))
    def take(self, units: int, unit: int) -> None:
        nbytes = units * unit
        try:
            block = self.pool.allocate(nbytes)
        except PoolExhaustedError:
            # Every free byte but the rests below a page can be had, in one piece.
            waste = 4096 * 2 * (len(self.live) + 2)
            assert nbytes + sum(b.nbytes for b, _ in self.live) + waste > 16 * MIB
            return
        self.num_taken += 1
        mark = self.num_taken % 251
        memoryview(block)[:] = bytes([mark]) * nbytes
        self.live.append((block, mark))

    @precondition(lambda self: self.live)
    @rule(choice=st.randoms(use_true_random=False))
    def give_back(self, choice: Any) -> None:
        block, mark = self.live.pop(choice.randrange(len(self.live)))
        assert bytes(memoryview(block)) == bytes([mark]) * block.nbytes

    @rule(mib=st.integers(4, 16))
    def limit(self, mib: int) -> None:
        """A lower limit leaves what lives alone; refusals then are the limit's."""
        self.pool.limit_nbytes = mib * MIB
        held = self.pool.stats()["reserved_nbytes"]
        with contextlib.suppress(PoolExhaustedError):
            self.pool.allocate(6 * MIB)
        assert self.pool.stats()["reserved_nbytes"] <= max(held, mib * MIB)
        self.pool.limit_nbytes = 16 * MIB

    @rule()
    def peaks(self) -> None:
        self.pool.reset_peaks()
        stats = self.pool.stats()
        assert stats["peak_live_nbytes"] == stats["live_nbytes"]
        assert stats["peak_reserved_nbytes"] == stats["reserved_nbytes"]

    @invariant()
    def snapshot_tells_the_same(self) -> None:
        entries = self.pool.snapshot()
        live = {entry[1]: entry[3] for entry in entries if entry[5] == "live"}
        assert live == {block.address: block.nbytes for block, _ in self.live}
        segments = sum(entry[2] for entry in entries if entry[0])
        blocks = sum(entry[2] for entry in entries if not entry[0])
        assert segments == blocks == self.pool.stats()["reserved_nbytes"]

    @rule()
    def trim(self) -> None:
        before = self.pool.stats()["reserved_nbytes"]
        assert self.pool.trim() == before - self.pool.stats()["reserved_nbytes"]

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        stats = PoolStats(**self.pool.stats())
        assert stats.live_nbytes == sum(block.nbytes for block, _ in self.live)
        assert stats.live_nbytes <= stats.reserved_nbytes <= 16 * MIB
        assert stats.largest_free_nbytes <= stats.free_nbytes <= stats.reserved_nbytes
        assert len({block.address for block, _ in self.live}) == len(self.live)
        assert all(block.address % 512 == 0 for block, _ in self.live)

    def teardown(self) -> None:
        while self.live:
            block, mark = self.live.pop()
            assert bytes(memoryview(block)) == bytes([mark]) * block.nbytes
            del block
        self.pool.trim()
        assert self.pool.stats()["reserved_nbytes"] == 0


class LazyPoolMachine(PoolMachine):
    def make_pool(self) -> Any:
        return core.make_lazy_pool(limit_nbytes=16 * MIB)


TestPoolMachine = PoolMachine.TestCase
TestLazyPoolMachine = LazyPoolMachine.TestCase
TestPoolMachine.settings = TestLazyPoolMachine.settings = hypothesis.settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
