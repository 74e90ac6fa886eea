"""Versions of weights: which one an action uses, how many are kept, and what cannot be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import (
    Kind,
    Schedule,
    VersionUse,
    Weights,
    build,
    version_use,
    weight_versions,
)
from tests.schedule.examples import schedule_of


def versions(schedule: Schedule, rank: int) -> dict[str, int]:
    first, end = schedule.ranks.offsets[rank : rank + 2]
    used = weight_versions(schedule)[first:end].tolist()
    return dict(zip(map(str, schedule.ranks[rank]), used, strict=True))


def with_weights(weights: Weights, *rows: str) -> Schedule:
    return Schedule.from_lists("mine", schedule_of(*rows).ranks, weights)


def test_stashed_backward_uses_the_version_of_its_forward() -> None:
    schedule = build("pipedream", 2, 4)
    assert versions(schedule, 0) == {
        "0F0": 0, "0F1": 0, "0B0": 0, "0U0": 1, "0F2": 1, "0B1": 0, "0U1": 2,
        "0F3": 2, "0B2": 1, "0U2": 3, "0B3": 2, "0U3": 4,
    }  # fmt: skip
    # The last stage has each backward right after its forward.
    assert version_use(schedule) == (VersionUse(2, 1, 1), VersionUse(1, 0, 0))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_pipedream_keeps_a_version_more_than_its_gradients_are_late(num_ranks: int) -> None:
    use = version_use(build("pipedream", num_ranks, 3 * num_ranks))
    for rank in range(num_ranks):
        warmup = num_ranks - 1 - rank
        assert use[rank] == VersionUse(warmup + 1, warmup, warmup)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_two_buffered_weights_are_one_batch_late_on_every_stage(num_ranks: int) -> None:
    schedule = build("pipedream-2bw", num_ranks, 4 * num_ranks)
    schedule.check()
    for live, delay, _ in version_use(schedule):
        assert (live, delay) == (2, 1)
    used = [versions(schedule, rank) for rank in range(num_ranks)]
    for rank, microbatch in itertools.product(range(num_ranks), range(4 * num_ranks)):
        expected = max(0, microbatch // num_ranks - 1)
        for kind in "FB":
            assert used[rank][f"{rank}{kind}{microbatch}"] == expected


def test_newest_weights_are_kept_once_and_crossed_by_updates() -> None:
    schedule = build("paci", 4, 16, update_every=2)
    use = version_use(schedule)
    assert [of.live for of in use] == [1, 1, 1, 1]
    # A warmup of P-1-k forwards is crossed by an update every two microbatches.
    assert [of.crossed for of in use] == [2, 1, 1, 0]
    assert versions(schedule, 0)["0B1"] == 0
    assert versions(schedule, 0)["0B2"] == 1


def test_schedule_without_updates_has_one_version() -> None:
    schedule = build("zb-h1", 2, 3)
    assert not weight_versions(schedule).any()
    assert version_use(schedule) == (VersionUse(1, 0, 0),) * 2


def test_split_backward_uses_one_version_in_both_parts() -> None:
    schedule = schedule_of("0F0 0F1 0I0 0W0 0U0 0I1 0W1 0U1")
    schedule.check()
    assert versions(schedule, 0)["0I1"] == versions(schedule, 0)["0W1"] == 0


@pytest.mark.parametrize(
    ("weights", "rows", "text"),
    [
        (Weights.ONE, ("0F0 0B0 0U0",), r"no updates \(U\) with one version .* got 1; give"),
        (Weights.STASHED, ("0F0 0B0",), "update after the last microbatch, 0U0; got none"),
        (Weights.STASHED, ("0F0 0B0 0U0 0F1 0B1",), "0U1; got 0U0 as the last of stage 0"),
        (
            Weights.STASHED,
            ("0F0 0F1 0B0 0B1 0U0 0U1",),
            "0U0 right after the backwards of microbatches 0 to 0.*got 2 of them before, the "
            "latest of microbatch 1",
        ),
        (Weights.STASHED, ("0F0 0F1 0B1 0U1 0B0",), "0U1 right after .* 0 to 1.*got 1 of them"),
        (Weights.STASHED, ("0F0 0U0 0B0",), "0B0 or 0W0 before 0U0; got 0U0 at position 1"),
        (
            Weights.NEWEST,
            ("0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1F1 1B1 1U1"),
            r"same microbatches on all stages; got \[0, 1\] on stage 0 and \[1\] on stage 1",
        ),
        (
            Weights.DOUBLE,
            ("0F0 0F1 0F2 0F3 0B0 0U0 0B1 0U1 0B2 0U2 0B3 0U3",),
            "expected 0F2 to find version 1 among the two newest; got versions 0 and 0; put at",
        ),
    ],
)
def test_updates_that_cannot_be_are_refused(
    weights: Weights, rows: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        with_weights(weights, *rows).check()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_update_moved_to_before_a_gradient_it_needs_is_refused(
    num_ranks: int, every: int, num_batches: int, data: st.DataObject
) -> None:
    schedule = build("paci", num_ranks, every * num_batches, update_every=every)
    schedule.check()
    rank = data.draw(st.integers(0, num_ranks - 1))
    rows = [list(row) for row in schedule.ranks]
    places = [place for place, action in enumerate(rows[rank]) if action.kind is Kind.U]
    place = data.draw(st.sampled_from(places))
    rows[rank].insert(place - 1, rows[rank].pop(place))
    with pytest.raises(ConfigError, match=r"before|right after"):
        Schedule.from_lists("moved", rows, Weights.NEWEST).check()
