"""ZB-V: torch's order, the paper's bubble and memory."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, build
from pipecomm.schedule.memory import peak_per_rank
from tests.schedule.torch_orders import torch_rows, torch_v_stages

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 3, 8, 16, 17)))


@pytest.mark.parametrize(("P", "M"), SIZES)
def test_order_is_that_of_torch(P: int, M: int) -> None:
    theirs = torch_schedules.ScheduleZBVZeroBubble(torch_v_stages(P), M)
    ours = build("zb-v", 2 * P, M)
    assert [list(map(str, row)) for row in ours.ranks] == torch_rows(theirs.pipeline_order)


@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_ranks_idle_only_before_their_first_and_after_their_last_action(P: int, M: int) -> None:
    result = build("zb-v", 2 * P, M).simulate(Costs(1.0, 2.0))
    assert result.step_s == pytest.approx(6 * M + P - 1)
    assert result.bubble <= 0.1


def test_memory_is_that_of_1f1bs_first_rank() -> None:
    for P, M in SIZES:
        # Stages are half as large as with one on each rank.
        peaks = peak_per_rank(build("zb-v", 2 * P, M), [0.5] * 2 * P, [0.5] * 2 * P)
        assert max(peaks) <= min(P, M)


@pytest.mark.parametrize("num_stages", [1, 3, 5])
def test_odd_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=r"zb-v: expected two stages on every rank"):
        build("zb-v", num_stages, 4)
