"""PipeDream-2BW: updates after batches of at least as many microbatches as ranks."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Kind, Weights, build


def test_updates_follow_the_last_backward_of_each_batch() -> None:
    schedule = build("pipedream-2bw", 2, 6, update_every=3)
    assert schedule.weights is Weights.DOUBLE
    for row in schedule.ranks:
        assert [action.microbatch for action in row if action.kind is Kind.U] == [2, 5]


@pytest.mark.parametrize(
    ("num_microbatches", "every", "text"),
    [
        (8, 3, "at least as many microbatches as ranks, 4, or a third version .* got 3"),
        (10, None, "a multiple of the 4 .* got 10; 8 and 12 are possible"),
        (3, None, "a multiple of the 4 .* got 3; 4 is possible"),
        (8, 5.0, "update_every to be an integer of at least 1; got 5.0"),
    ],
)
def test_batch_that_has_no_form_is_refused(num_microbatches: int, every: object, text: str) -> None:
    with pytest.raises(ConfigError, match=f"pipedream-2bw: expected .*{text}"):
        build("pipedream-2bw", 4, num_microbatches, update_every=every)
