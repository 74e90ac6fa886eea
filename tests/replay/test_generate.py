"""The traces that matter: they balance, repeat exactly, and the pool wastes little on them."""

from __future__ import annotations

import numpy as np
import pytest

from pipecomm.errors import ConfigError
from pipecomm.replay.compare import compare
from pipecomm.replay.generate import TRACES, generate


@pytest.mark.parametrize("name", TRACES)
def test_pool_holds_at_most_three_percent_more_than_lives(name: str) -> None:
    trace = generate(name)
    comparison = compare(trace)
    assert comparison.num_events == trace.num_events > 1_000
    assert comparison.peak_live_nbytes > 1 << 30
    assert comparison.ratio("pipecomm") <= 1.03
    # The trace tells allocators apart.
    assert comparison.ratio("size-classes") > 1.05


def test_trace_is_the_same_each_time() -> None:
    first, second = generate("evaluation"), generate("evaluation")
    assert np.array_equal(first.nbytes, second.nbytes)
    assert np.array_equal(first.ids, second.ids)


def test_recomputation_keeps_less() -> None:
    peaks = {name: compare(generate(name), []).peak_live_nbytes for name in TRACES}
    assert peaks["1f1b-recompute"] < peaks["1f1b"]
    assert peaks["interleaved-recompute"] < peaks["interleaved"]


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'zigzag'"):
        generate("zigzag")
