"""Looped breadth-first: torch's order, and GPipe's bubble over the stages per rank."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipecomm.schedule import build
from tests.schedule.torch_orders import torch_rows, torch_stages

SIZES = list(itertools.product((1, 2, 4, 8), (1, 2, 3), (1, 4, 7)))


@pytest.mark.parametrize(("P", "v", "M"), SIZES)
def test_order_is_that_of_torch(P: int, v: int, M: int) -> None:
    theirs = torch_schedules.ScheduleLoopedBFS(torch_stages(P * v, P), M)
    ours = build("looped-bfs", P * v, M, num_ranks=P)
    assert [list(map(str, row)) for row in ours.ranks] == torch_rows(theirs.pipeline_order)


def test_bubble_is_that_of_gpipe_over_the_stages_per_rank() -> None:
    for P, v, M in SIZES:
        if M >= P:
            schedule = build("looped-bfs", P * v, M, num_ranks=P)
            assert schedule.simulate().bubble == pytest.approx((P - 1) / (v * M + P - 1))
            assert schedule.peak_activations() == (M,) * (P * v)
