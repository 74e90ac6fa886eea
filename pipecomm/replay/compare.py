"""One trace against every policy: the most each would have held, and whether it would fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipecomm._native import core
from pipecomm.replay.trace import Trace

__all__ = ["Comparison", "Replayed", "compare"]


@dataclass(frozen=True)
class Replayed:
    """What one policy made of a trace.

    `peak_reserved_nbytes`: the most held from the system. `fits`: whether all was served in the
    capacity asked for, with what the policy does before it gives up (None: no capacity was).
    `reserved_nbytes`: the most in each of equal parts of the trace.
    """

    policy: str
    peak_reserved_nbytes: int
    num_upstream_calls: int
    fits: bool | None
    reserved_nbytes: list[int]


@dataclass(frozen=True)
class Comparison:
    """All policies over one trace; no policy can hold less than `peak_live_nbytes`."""

    num_events: int
    peak_live_nbytes: int
    live_nbytes: list[int]
    replayed: list[Replayed]

    def ratio(self, policy: str) -> float:
        """Peak reserved over peak live."""
        (one,) = (one for one in self.replayed if one.policy == policy)
        return one.peak_reserved_nbytes / max(self.peak_live_nbytes, 1)


def compare(
    trace: Trace,
    policies: Sequence[str] | None = None,
    capacity_nbytes: int | None = None,
    num_samples: int = 0,
    on_done: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Replay `trace` against `policies` (default: all there are).

    "pipecomm" is this library's pool on the host; "torch" and "torch:expandable" are models of
    torch's caching allocator, by its source; "size-classes" rounds up to four classes for each
    doubling, as jemalloc does, and never splits. Nothing is allocated, so a trace may be larger
    than the machine. Policies run side by side; `on_done(done, total)` is called after each walk
    of the trace. Raises ConfigError for an unknown policy or a trace that makes no sense.
    """
    arrays = [np.ascontiguousarray(a, np.int64) for a in (trace.ids, trace.nbytes, trace.streams)]
    prepared = core.ReplayTrace(*arrays)
    names = list(core.replay_policies() if policies is None else policies)
    capacities = [0] if capacity_nbytes is None else [0, capacity_nbytes]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        walks = {
            (name, capacity): threads.submit(
                prepared.replay, name, capacity_nbytes=capacity, num_samples=num_samples
            )
            for capacity in capacities
            for name in names
        }
        for done, walk in enumerate(as_completed(walks.values()), 1):
            walk.result()
            if on_done is not None:
                on_done(done, len(walks))
    results = {key: walk.result() for key, walk in walks.items()}
    replayed = [_replayed(name, results, capacity_nbytes) for name in names]
    live = results[names[-1], 0]["live_nbytes"] if names else []
    return Comparison(trace.num_events, prepared.peak_live_nbytes, live, replayed)


def _replayed(
    name: str, results: dict[tuple[str, int], dict[str, Any]], capacity_nbytes: int | None
) -> Replayed:
    free = results[name, 0]
    fits = None if capacity_nbytes is None else results[name, capacity_nbytes]["failed_at"] is None
    return Replayed(
        name,
        free["peak_reserved_nbytes"],
        free["num_upstream_calls"],
        fits,
        free["reserved_nbytes"],
    )
