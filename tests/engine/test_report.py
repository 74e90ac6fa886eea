"""The report of a step: every rank's numbers on every rank, beside the plan with measured times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.measured import costs_of, own_times
from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.report import RankReport, StepReport, gather_report
from pipecomm.engine.stats import StepStats
from pipecomm.errors import ConfigError, StageFailedError
from pipecomm.memory.pool import MemoryPool
from pipecomm.schedule import Action, build
from tests.engine.pipeline_cases import TIMEOUT_S, WIDTH, CasesBySize, batch, linear_stages, mse

FORWARD_S = 0.02


class Slow(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        y: Tensor = self.inner(x)
        return y


def of_a_step(rank: int, size: int) -> dict[str, Any]:
    pool = MemoryPool()
    with Pipeline(
        Slow(linear_stages(size)[rank]),
        schedule="1f1b",
        num_microbatches=6,
        loss_fn=mse,
        timeout_s=TIMEOUT_S,
        pool=pool,
    ) as pipeline:
        given = batch(6)
        result = pipeline.train_step(given.inputs, given.targets)
        report = pipeline.report(result)
        # The next step is none the worse for it.
        assert pipeline.train_step(given.inputs, given.targets).loss == result.loss
    return {"report": report, "text": str(report), "stats": result.stats}


def one_rank_runs_a_step_instead(rank: int, size: int) -> list[str]:
    given = batch(2)
    with Pipeline(
        linear_stages(size)[rank], num_microbatches=2, loss_fn=mse, timeout_s=TIMEOUT_S
    ) as pipeline:
        result = pipeline.train_step(given.inputs, given.targets)
        try:
            if rank == 0:
                pipeline.train_step(given.inputs, given.targets)
            else:
                pipeline.report(result)
        except (ConfigError, StageFailedError) as error:
            return [str(error)]
    return []


CASES = {2: (one_rank_runs_a_step_instead,), 3: (of_a_step,)}


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(CASES)


def test_every_rank_has_every_ranks_numbers(results: CasesBySize) -> None:
    found = results(3, of_a_step)
    texts = {one["text"] for one in found}
    assert len(texts) == 1
    report: StepReport = found[0]["report"]
    for rank, one in enumerate(found):
        stats: StepStats = one["stats"]
        own = report.ranks[rank]
        assert own.step_s == stats.step_s
        assert own.compute_s == stats.compute_s
        assert own.bubble == stats.bubble
        assert own.wire_nbytes_sent == stats.wire_nbytes_sent > own.payload_nbytes_sent > 0
    assert [rank.peak_activations for rank in report.ranks] == [3, 2, 1]
    # Received gradients on rank 0, activations elsewhere: some bytes of the pool each.
    assert all(rank.memory_nbytes >= WIDTH * 4 for rank in report.ranks)


def test_plan_is_walked_with_the_times_that_were_measured(results: CasesBySize) -> None:
    report: StepReport = results(3, of_a_step)[0]["report"]
    # Six forwards, one after another, and two before the last stage has the first.
    assert 8 * FORWARD_S <= report.planned.step_s <= report.step_s
    assert len(report.planned.rank_bubbles) == 3
    lines = report.__str__().splitlines()
    assert lines[0].startswith("1f1b: step ")
    assert len(lines) == 2 + 3


def test_a_rank_that_runs_something_else_is_told(results: CasesBySize) -> None:
    for told in results(2, one_rank_runs_a_step_instead):
        assert "expected every rank to run the same; got report" in "".join(told)


def test_alone_a_rank_reports_itself() -> None:
    schedule = build("gpipe", 1, 1)
    stats = StepStats(step_s=4.0)
    for text, start_s in (("0F0", 0.0), ("0B0", 1.0)):
        stats.add_compute(Action.parse(text), start_s, start_s + 1)
    report = gather_report(stats, 17, schedule, lambda value: [value])
    assert report.ranks == (RankReport(4.0, 2.0, 0.0, 0.0, 0, 0, 1, 1, 17),)
    assert (report.step_s, report.bubble, report.planned.step_s) == (4.0, 0.5, 2.0)


def test_a_step_of_no_time_has_no_bubble() -> None:
    times = own_times(StepStats(), build("gpipe", 1, 1).placement)
    planned = build("gpipe", 1, 1).simulate(costs_of([times]))
    report = StepReport("gpipe", (RankReport(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 1, 0),), planned)
    assert report.bubble == 0


def test_memory_on_a_gpu_is_what_torch_has_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipecomm.engine.report import peak_memory_nbytes

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + device.index)
    assert peak_memory_nbytes(torch.device("cuda", 1), None) == 1001
