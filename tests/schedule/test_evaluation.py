"""The order of an evaluation can be executed over any placement."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Placement, forward_rounds

PLACEMENTS = [
    Placement.linear(1, 1),
    Placement.linear(4, 4),
    Placement.looped(4, 2),
    Placement.looped(12, 4),
    Placement.v_shaped(8, 4),
    Placement((0, 0, 1, 1)),
    Placement((2, 0, 1)),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: str(placement.rank_of))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 17])
def test_forwards_run_without_eager_sends_and_keep_their_place(
    placement: Placement, num_microbatches: int
) -> None:
    schedule = forward_rounds(placement, num_microbatches)
    schedule.check()
    assert schedule.placement == placement
    assert not schedule.has_backward


def test_evaluation_of_no_microbatches_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_microbatches to be an integer of at least 1"):
        forward_rounds(Placement.linear(2, 2), 0)
