"""DualPipeV: torch's order, and the pairs that an engine can overlap."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, build
from tests.schedule.torch_orders import torch_rows, torch_v_stages

SIZES = [(P, M) for P, M in itertools.product(range(1, 9), (2, 5, 8, 16, 19)) if M >= 2 * P]


@pytest.mark.parametrize(("P", "M"), SIZES)
def test_order_is_that_of_torch(P: int, M: int) -> None:
    theirs = torch_schedules.ScheduleDualPipeV(torch_v_stages(P), M)
    ours = build("dualpipe-v", 2 * P, M)
    unfused = [
        [text for cell in row for text in cell.removesuffix("OVERLAP_F_B").strip("()").split(";")]
        for row in torch_rows(theirs.pipeline_order)
    ]
    assert [list(map(str, row)) for row in ours.ranks] == unfused


@pytest.mark.parametrize("P", [2, 4, 8])
def test_fewer_microbatches_than_stages_are_refused(P: int) -> None:
    text = f"dualpipe-v: expected at least as many .* got {2 * P - 1} for {2 * P}; {2 * P} and"
    with pytest.raises(ConfigError, match=text):
        build("dualpipe-v", 2 * P, 2 * P - 1)


def test_bubble_is_below_that_of_1f1b() -> None:
    # Half a rank's work is in each of its two stages.
    costs = Costs(0.5, 1.0)
    for P, M in ((4, 8), (4, 16), (8, 16)):
        one = build("1f1b", P, M).simulate(Costs(1.0, 2.0))
        assert build("dualpipe-v", 2 * P, M).simulate(costs).bubble < one.bubble
