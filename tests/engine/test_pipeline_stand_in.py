"""The engine with the host as the device, whose streams lag: what does not wait for them is wrong.

PIPECOMM_STAND_IN_DEVICE=1 makes tensors cross as those of a GPU do, and Transfer.wait() return
when the work is enqueued; only then the caller waits for the stream.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.codecs.codec import Codec
from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import StageFailedError
from pipecomm.memory.pool import MemoryPool
from tests.engine import (
    pipeline_data_cases,
    pipeline_error_cases,
    pipeline_step_cases,
    test_grad_norm,
    test_pipeline_memory,
)
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    Batch,
    results_of,
    rows,
    run_cases,
    worst_error,
)
from tests.links.test_link import RAW, Pair
from tests.patience import patient
from tests.ranks import spawn_ranks

SIZE = 3
_ENV = {"PIPECOMM_STAND_IN_DEVICE": "1", "PIPECOMM_STAND_IN_LAG_US": "200"}
# Much later than what does not wait, also on a busy machine.
_LATE = {**_ENV, "PIPECOMM_STAND_IN_LAG_US": "5000"}
# Where each rank is another host, tensors of the device come through pinned memory.
_TCP = {**_ENV, "PIPECOMM_TRANSPORT": "tcp"}


class _UnusedOutput(nn.Module):
    """Gives an output that nobody uses: its gradient does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *ignored: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh(), self.linear(x)


def absent_gradients(rank: int, size: int) -> float:
    torch.manual_seed(0)
    stages = [_UnusedOutput() for _ in range(size)]
    given = Batch(rows(8), rows(8, seed=2))
    return worst_error(
        rank,
        stages,
        [given] * 2,
        loss_fn=lambda output, target: nn.functional.mse_loss(output[0], target),
        num_microbatches=4,
    )


class _SendsItsTable(nn.Module):
    """What the first stage sends is its parameter itself, which the caller writes to later."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(256, WIDTH))
        self.is_first = rank == 0

    def forward(self, x: Tensor) -> Tensor:
        return self.table if self.is_first else x


def tables_sent(rank: int, size: int) -> list[float]:
    """What arrives when the table is written to as soon as the step is over."""
    stage = _SendsItsTable(rank)
    found = []
    with Pipeline(stage, timeout_s=TIMEOUT_S) as pipeline:
        for _ in range(5):
            result = pipeline.eval_step(rows(4), return_outputs=True)
            with torch.no_grad():
                stage.table.add_(1)
            found += [output.mean().item() for output in result.outputs or []]
    return found


_STEPS: tuple[Callable[[int, int], Any], ...] = (
    pipeline_step_cases.without_eager_sends,
    pipeline_step_cases.length_changes_between_microbatches,
    pipeline_step_cases.residual_beside,
    pipeline_step_cases.integers_beside,
    pipeline_step_cases.frozen_stages,
    pipeline_step_cases.lossy_codecs,
    pipeline_step_cases.identity_outputs,
    pipeline_error_cases.stage_raises,
    pipeline_error_cases.step_after_an_error_is_right,
    pipeline_data_cases.channels_last,
    test_pipeline_memory.evaluation_between_training,
    test_grad_norm.clipped_like_the_unsplit_model,
    absent_gradients,
)


@pytest.fixture(scope="module")
def results() -> Callable[[Callable[..., Any]], list[Any]]:
    """results(case) -> the case's result on each rank."""
    by_rank = spawn_ranks(SIZE, run_cases, _STEPS, env=_ENV, timeout_s=120)
    return lambda case: results_of(by_rank, case)


def _worst(found: Any) -> float:
    if isinstance(found, dict):
        return max(map(_worst, found.values()))
    return max(map(_worst, found)) if isinstance(found, list) else float(found)


@pytest.mark.parametrize(
    "case",
    [
        pipeline_step_cases.without_eager_sends,
        pipeline_step_cases.length_changes_between_microbatches,
        pipeline_step_cases.residual_beside,
        pipeline_step_cases.frozen_stages,
        pipeline_error_cases.step_after_an_error_is_right,
        absent_gradients,
    ],
    ids=lambda case: case.__name__,
)
def test_gradients_and_losses_equal_those_of_the_unsplit_model(results: Any, case: Any) -> None:
    assert _worst(results(case)) < 1e-5


def test_tensors_from_other_hosts_come_through_pinned_memory() -> None:
    cases = (pipeline_step_cases.residual_beside, pipeline_step_cases.integers_beside)
    by_rank = spawn_ranks(SIZE, run_cases, cases, env=_TCP, timeout_s=60)
    assert _worst(results_of(by_rank, cases[0])) < 1e-5
    assert all(found["exact"] for found in results_of(by_rank, cases[1]))


def test_sender_may_write_to_its_tensors_after_the_step() -> None:
    by_rank = spawn_ranks(2, run_cases, (tables_sent,), env=_LATE, timeout_s=60)
    assert results_of(by_rank, tables_sent) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_integers_arrive_exactly(results: Any) -> None:
    for found in results(pipeline_step_cases.integers_beside):
        assert found["error"] < 1e-5
        assert found["exact"]


def test_channels_last_stages_keep_their_format(results: Any) -> None:
    for found in results(pipeline_data_cases.channels_last):
        assert found["error"] < 1e-5
        assert sorted(found["seen"]) == sorted(found["unsplit"] * 6)


def test_outputs_come_back_in_order(results: Any) -> None:
    assert results(pipeline_step_cases.identity_outputs)[-1] == {
        "losses": [0.0] * 8,
        "in order": True,
    }


def test_evaluation_leaves_training_as_it_was(results: Any) -> None:
    for found in results(test_pipeline_memory.evaluation_between_training):
        assert max(found["errors"] + found["loss errors"]) < 1e-5


@pytest.mark.parametrize(("codec", "limit"), [("int8", 0.1), ("int4", 0.5)])
def test_lossy_codec_stays_near_but_differs(results: Any, codec: str, limit: float) -> None:
    errors = [found[codec] for found in results(pipeline_step_cases.lossy_codecs)]
    assert 1e-5 < max(errors) < limit


def test_error_of_a_stage_reaches_every_rank(results: Any) -> None:
    for rank, outcomes in enumerate(results(pipeline_error_cases.stage_raises)):
        for (where, _), outcome in outcomes.items():
            assert isinstance(outcome.error, ValueError if rank == where else StageFailedError)
            assert "boom" in str(outcome.error)


def test_norm_over_stages_is_the_same_everywhere(results: Any) -> None:
    by_rank = results(test_grad_norm.clipped_like_the_unsplit_model)
    for found in zip(*(each.values() for each in by_rank), strict=True):
        assert len({norm for norm, _, _ in found}) == 1
        assert max(worst for _, _, worst in found) < 1e-5


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in _LATE.items():
        monkeypatch.setenv(name, value)
    made = Pair(pool=MemoryPool())
    yield made
    made.close()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(20)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_received_memory_goes_back_to_the_pool(pair: Pair) -> None:
    (kept,) = pair.forward([torch.ones(50_000)])
    for microbatch in range(5):
        pair.forward([torch.ones(50_000)], microbatch=microbatch)
    assert pair.pool.stats().live_nbytes == kept.nbytes
    del kept
    gc.collect()
    assert pair.pool.stats().live_nbytes == 0


def test_memory_of_a_message_that_nobody_waits_for_goes_back_too(pair: Pair) -> None:
    pair.low.send(1, [torch.ones(50_000)], direction="forward", microbatch=0, codec=RAW)
    dropped = pair.high.receive(0, direction="forward", microbatch=0)
    while not dropped.is_done:
        time.sleep(0.001)
    assert pair.pool.stats().live_nbytes > 0
    del dropped
    _wait_until(lambda: pair.pool.stats().live_nbytes == 0)


def test_tensors_are_kept_until_the_stream_has_read_them(pair: Pair) -> None:
    """After wait() a stream may still read; what is dropped then is not used again before."""
    for microbatch in range(4):
        pair.low.send(
            1,
            [torch.full((100_000,), float(microbatch))],
            direction="forward",
            microbatch=microbatch,
            codec=RAW,
        )
        torch.full((100_000,), -1.0)
    for microbatch in range(4):
        (got,) = pair.high.receive(0, direction="forward", microbatch=microbatch).wait()
        assert torch.equal(got, torch.full((100_000,), float(microbatch)))


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_wait_leaves_the_tensors_to_the_caller(pair: Pair, codec: str) -> None:
    made = Codec(codec)
    for microbatch in range(3):
        sent = torch.full((64, 2048), float(microbatch + 1))
        got = pair.high.receive(0, direction="forward", microbatch=microbatch)
        transfer = pair.low.send(1, [sent], direction="forward", microbatch=microbatch, codec=made)
        transfer.wait()
        sent.fill_(-1)
        assert torch.equal(got.wait()[0], torch.full((64, 2048), float(microbatch + 1)))
