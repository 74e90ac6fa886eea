"""Local accumulation without a stash: how many updates lie between forward and backward."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Weights, build, version_use


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_microbatch_is_crossed_by_no_more_updates_than_the_formula_says(every: int) -> None:
    schedule = build("paci", 4, 12, update_every=every)
    assert schedule.weights is Weights.NEWEST
    for rank, use in enumerate(version_use(schedule)):
        assert use.crossed <= -(-(3 - rank) // every)
    assert version_use(schedule)[0].crossed > 0


def test_microbatches_that_leave_gradients_without_an_update_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a multiple of the 4 .* got 6; 4 and 8 are possible"):
        build("paci", 4, 6)
