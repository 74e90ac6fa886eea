"""Measuring what a link carries: right within a factor, on both sides, and it ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from pipecomm.link import LinkEmulation, Links
from pipecomm.link_speed import measure_speeds
from tests.patience import patient


def measured(size: int, emulation: LinkEmulation | None) -> list[dict[Any, float]]:
    """Each rank's speeds, all ranks being threads of this process."""
    store = dist.HashStore()
    found: list[dict[Any, float]] = [{}] * size

    def run(rank: int) -> None:
        links = Links.connect(store, rank, size, timeout_s=patient(30), emulation=emulation)
        links.begin_step(1)
        found[rank] = measure_speeds(links)
        links.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_link_is_measured_by_its_sender() -> None:
    found = measured(3, None)
    assert [sorted(speeds) for speeds in found] == [
        ["forward"],
        ["backward", "forward"],
        ["backward"],
    ]


@pytest.mark.parametrize(("mbps", "latency_ms"), [(80, 0), (80, 20)])
def test_emulated_speed_is_found_whatever_the_latency(mbps: float, latency_ms: float) -> None:
    first, last = measured(2, LinkEmulation(mbps, latency_ms))
    expected = mbps * 1e6 / 8
    for speed in (first["forward"], last["backward"]):
        # A busy machine makes a link look slower, nothing makes it faster.
        assert 0.2 * expected < speed < 1.3 * expected


def test_real_link_is_faster_than_a_slow_emulated_one() -> None:
    (first, _), (slow, _) = measured(2, None), measured(2, LinkEmulation(8, 0))
    assert first["forward"] > 10 * slow["forward"]
