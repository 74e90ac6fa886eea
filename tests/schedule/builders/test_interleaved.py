"""Interleaved 1F1B: its grid, torch's order, the formulas of the paper, at every small size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipecomm.errors import ConfigError
from pipecomm.schedule import Placement, Schedule, build
from tests.schedule.torch_orders import torch_rows, torch_stages

# Ranks, stages per rank, microbatches.
SIZES = list(itertools.product(range(1, 9), range(1, 4), range(1, 17)))


def has_form(P: int, v: int, M: int) -> bool:
    return v == 1 or M % max(1, M // P) == 0


def small_schedules() -> Iterator[tuple[int, int, int, Schedule]]:
    for P, v, M in SIZES:
        if has_form(P, v, M):
            yield P, v, M, build("interleaved", P * v, M, num_ranks=P)


def test_two_stages_on_two_ranks_are_the_grid_a_person_draws() -> None:
    drawn = build("interleaved", 4, 2, num_ranks=2).draw()
    assert (
        drawn
        == """
slot     0   1   2   3   4   5   6   7   8   9
rank 0 0F0 0F1 2F0 2F1   . 2B0   . 2B1 0B0 0B1
rank 1   . 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1   .
""".strip()
    )


def test_every_size_that_has_a_form_is_executable() -> None:
    for P, v, M, schedule in small_schedules():
        schedule.check()
        assert schedule.placement == Placement.looped(P * v, P), (P, v, M)


def test_bubble_is_that_of_1f1b_over_the_stages_per_rank() -> None:
    for P, v, M, schedule in small_schedules():
        if M % P == 0:
            bubble = (P - 1) / (v * M + P - 1)
            assert schedule.simulate().bubble == pytest.approx(bubble), (P, v, M)


def test_rank_keeps_no_more_activations_than_its_warmup_and_one() -> None:
    for P, v, M, schedule in small_schedules():
        if M % P == 0:
            for rank, row in enumerate(schedule.ranks):
                live = itertools.accumulate(action.kind.change_in_live for action in row)
                warmup = (v - 1) * P + 2 * (P - 1 - rank)
                assert max(live) == min(warmup + 1, v * M), (P, v, M)


def test_order_is_that_of_torch_and_so_are_the_sizes() -> None:
    for P, v, M in SIZES:
        if v > 1:
            assert ours(P, v, M) == theirs(P, v, M), (P, v, M)


def ours(P: int, v: int, M: int) -> list[list[str]] | None:
    try:
        schedule = build("interleaved", P * v, M, num_ranks=P)
    except ConfigError:
        return None
    return [list(map(str, row)) for row in schedule.ranks]


def theirs(P: int, v: int, M: int) -> list[list[str]] | None:
    try:
        made = torch_schedules.ScheduleInterleaved1F1B(torch_stages(P * v, P), M)
    except ValueError:
        return None
    return torch_rows(made.pipeline_order)


@pytest.mark.parametrize(
    ("num_microbatches", "nearest"), [(9, "8 and 12"), (11, "8 and 12"), (13, "12 and 16")]
)
def test_microbatches_without_equal_rounds_are_refused_with_the_nearest_that_have(
    num_microbatches: int, nearest: str
) -> None:
    text = f"interleaved: expected .*; got {num_microbatches} on 4 ranks; {nearest} are possible"
    with pytest.raises(ConfigError, match=text):
        build("interleaved", 8, num_microbatches, num_ranks=4)
    for number in map(int, nearest.split(" and ")):
        build("interleaved", 8, number, num_ranks=4).check()


def test_stages_that_ranks_cannot_share_equally_are_refused() -> None:
    text = "interleaved: expected the same number of stages on every rank; got 5 stages on 2 ranks"
    with pytest.raises(ConfigError, match=text):
        build("interleaved", 5, 4, num_ranks=2)


def test_one_stage_per_rank_has_a_form_for_any_number_of_microbatches() -> None:
    assert build("interleaved", 3, 7).ranks == build("eager-1f1b", 3, 7).ranks
