"""Policies over traces whose outcome can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.compare import compare
from pipecomm.replay.trace import Trace, TraceBuilder

MIB = 1 << 20


def trace_of(*events: tuple[int, int]) -> Trace:
    builder = TraceBuilder()
    for block, nbytes in events:
        builder._add(block, nbytes, 0)
    return builder.build()


def reserved(trace: Trace, policy: str) -> int:
    (one,) = compare(trace, [policy]).replayed
    return one.peak_reserved_nbytes


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ],
)
def test_torch_takes_the_segments_of_its_source(nbytes: int, segment: int) -> None:
    assert reserved(trace_of((0, nbytes)), "torch") == segment


@pytest.mark.parametrize(
    ("nbytes", "mapped"),
    [(1, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 20 * MIB), (21 * MIB, 40 * MIB)],
)
def test_expandable_segments_map_whole_buffers(nbytes: int, mapped: int) -> None:
    assert reserved(trace_of((0, nbytes)), "torch:expandable") == mapped


def test_torch_splits_a_large_block_only_where_more_than_one_mib_is_left() -> None:
    # 20 MiB free; 19.5 MiB leave 0.5 MiB with the block, 18 MiB leave 2 MiB for the next.
    kept_whole = trace_of((0, 5 * MIB), (0, -1), (1, 19 * MIB + MIB // 2), (2, MIB + 512))
    assert reserved(kept_whole, "torch") == 40 * MIB
    split = trace_of((0, 5 * MIB), (0, -1), (1, 18 * MIB), (2, MIB + 512))
    assert reserved(split, "torch") == 20 * MIB


def test_torch_keeps_segments_apart_where_expandable_ones_join() -> None:
    events = [(i, 12 * MIB) for i in range(4)] + [(i, -1) for i in range(4)] + [(9, 40 * MIB)]
    assert reserved(trace_of(*events), "torch") == (48 + 40) * MIB
    assert reserved(trace_of(*events), "torch:expandable") == 60 * MIB
    assert reserved(trace_of(*events), "pipecomm") <= 50 * MIB


def test_torch_keeps_memory_by_stream() -> None:
    builder = TraceBuilder()
    for stream in (0, 7):
        builder.allocate(stream, 5 * MIB, stream)
        builder.free(stream, stream)
    assert reserved(builder.build(), "torch") == 40 * MIB
    assert reserved(builder.build(), "pipecomm") <= 7 * MIB


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(1, 512), (513, 1024), (5 << 10, 5 << 10), ((8 << 10) + 1, 10 << 10)]
)
def test_size_classes_are_four_for_each_doubling(nbytes: int, rounded: int) -> None:
    assert reserved(trace_of((0, nbytes)), "size-classes") == rounded


def test_size_classes_serve_no_other_class() -> None:
    assert reserved(trace_of((0, 1024), (0, -1), (1, 512)), "size-classes") == 1536
    assert reserved(trace_of((0, 1024), (0, -1), (1, 1000)), "size-classes") == 1024


def waves(num_requests: int) -> Trace:
    """Random sizes of 4 KB to 2.7 MB freed out of order, 52 % allocations, up to 200 MB live."""
    choose = random.Random(0)
    builder = TraceBuilder("waves")
    live: list[tuple[int, int]] = []
    total = 0
    for block in range(num_requests):
        nbytes = choose.randint(4_000, 2_700_000)
        if not live or (choose.random() < 0.52 and total + nbytes <= 200_000_000):
            live.append((block, nbytes))
            total += nbytes
            builder.allocate(block, nbytes)
        else:
            freed, size = live.pop(choose.randrange(len(live)))
            total -= size
            builder.free(freed)
    return builder.build()


def test_pool_holds_at_most_five_percent_more_than_lives_on_waves() -> None:
    comparison = compare(waves(20_000))
    assert comparison.peak_live_nbytes > 150_000_000
    assert comparison.ratio("pipecomm") <= 1.05
    assert comparison.ratio("torch") > 1.05  # the waves do fragment


def test_capacity_tells_who_fits() -> None:
    trace = waves(4_000)
    free = compare(trace)
    between = round(1.05 * free.peak_live_nbytes)
    verdicts = {one.policy: one.fits for one in compare(trace, capacity_nbytes=between).replayed}
    assert verdicts["pipecomm"]
    assert not verdicts["size-classes"]
    below = compare(trace, capacity_nbytes=free.peak_live_nbytes - 1).replayed
    assert not any(one.fits for one in below)
    assert all(one.fits is None for one in free.replayed)


def test_walks_are_told_one_by_one() -> None:
    calls: list[tuple[int, int]] = []
    compare(waves(500), capacity_nbytes=MIB, on_done=lambda *call: calls.append(call))
    assert calls == [(done, 8) for done in range(1, 9)]


def test_samples_are_the_most_in_each_part() -> None:
    trace = trace_of((0, 4 * MIB), (0, -1), (1, MIB), (1, -1))
    comparison = compare(trace, ["torch"], num_samples=2)
    assert comparison.live_nbytes == [4 * MIB, MIB]
    assert comparison.replayed[0].reserved_nbytes == [20 * MIB, 22 * MIB]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([(0, 1), (0, 2)], "event 1 .* not live"),
        ([(0, -1)], "event 0 .* live id"),
        ([(0, 1), (1, -5)], "event 1 .* got -5"),
    ],
)
def test_trace_that_makes_no_sense_is_refused(events: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compare(trace_of(*events))


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="got best"):
        compare(trace_of((0, 1)), ["best"])
