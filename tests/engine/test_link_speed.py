"""Measuring what a link carries: right within a factor, on both sides, and it ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pipecomm.engine import link_speed
from pipecomm.engine.link_speed import boundary_speeds, measure_speeds
from pipecomm.links.link import LinkEmulation, Links
from pipecomm.schedule import Placement
from tests.patience import patient


def of_ranks(size: int, emulation: LinkEmulation | None, look: Callable[[Links], Any]) -> list[Any]:
    """What each rank finds, all ranks being threads of this process."""
    store = dist.HashStore()
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        links = Links.connect(store, rank, size, timeout_s=patient(30), emulation=emulation)
        links.begin_step(1)
        found[rank] = look(links)
        links.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def measured(size: int, emulation: LinkEmulation | None) -> list[dict[int, float]]:
    return of_ranks(size, emulation, lambda links: measure_speeds(links, line(size)))


def line(size: int) -> Placement:
    return Placement.linear(size, size)


def boundaries(size: int, emulation: LinkEmulation | None = None) -> list[Any]:
    def look(links: Links) -> list[float]:
        return boundary_speeds(links, line(size), emulation=emulation)

    return of_ranks(size, emulation, look)


def test_every_link_is_measured_by_its_sender() -> None:
    found = measured(3, None)
    assert [sorted(speeds) for speeds in found] == [[1], [0, 2], [1]]


def test_each_pair_of_ranks_is_measured_once_however_many_boundaries_it_has() -> None:
    placement = Placement.looped(6, 3)
    found = of_ranks(3, None, lambda links: measure_speeds(links, placement))
    assert [sorted(speeds) for speeds in found] == [[1, 2], [0, 2], [0, 1]]


def test_boundary_inside_a_rank_is_as_fast_as_it_gets() -> None:
    def look(links: Links) -> list[float]:
        return boundary_speeds(links, Placement.v_shaped(4, 2), emulation=emulation)

    emulation = LinkEmulation(80, 0)
    assert of_ranks(2, emulation, look) == [[1e7, math.inf, 1e7]] * 2


@pytest.mark.parametrize(("mbps", "latency_ms"), [(80, 0), (80, 20)])
def test_emulated_speed_is_found_whatever_the_latency(mbps: float, latency_ms: float) -> None:
    first, last = measured(2, LinkEmulation(mbps, latency_ms))
    expected = mbps * 1e6 / 8
    for speed in (first[1], last[0]):
        # A busy machine makes a link look slower, nothing makes it faster.
        assert 0.2 * expected < speed < 1.3 * expected


def test_real_link_is_faster_than_a_slow_emulated_one() -> None:
    (first, _), (slow, _) = measured(2, None), measured(2, LinkEmulation(8, 0))
    assert first[1] > 10 * slow[1]


def test_links_of_one_host_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "_ask", lambda *_: 1e6)
    assert boundaries(3) == [[math.inf] * 2] * 3


def test_emulated_links_have_exactly_the_rate_they_were_given() -> None:
    emulation = LinkEmulation(80, 1)
    found = boundaries(3, emulation)
    assert found == [[1e7] * 2] * 3


def test_link_with_a_latency_only_is_as_fast_as_the_host() -> None:
    emulation = LinkEmulation(0, 1)
    found = boundaries(2, emulation)
    assert found == [[math.inf]] * 2


def test_slower_direction_of_a_boundary_counts_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = {(0, 1): 1.25e9, (1, 0): 2.03e9, (1, 2): 3e9, (2, 1): 2.5e9}
    monkeypatch.setattr(Links, "shares_memory", lambda self, peer: False)
    monkeypatch.setattr(link_speed, "_answer", lambda *_: None)
    monkeypatch.setattr(link_speed, "_ask", lambda links, peer, *_: speeds[links.rank, peer])
    assert boundaries(3) == [[1.25e9, 2.5e9]] * 3


def test_only_the_links_to_other_hosts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [0, 0, 1]
    monkeypatch.setattr(Links, "shares_memory", lambda self, peer: hosts[self.rank] == hosts[peer])
    first, second, third = boundaries(3)
    assert first == second == third
    assert first[0] == math.inf
    assert first[1] < math.inf
