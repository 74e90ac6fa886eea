"""Pipelines whose stages are on several hosts: exact, quantized, and alive after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecomm
from pipecomm.codecs.policy import CodecPolicy
from pipecomm.errors import StageFailedError
from tests.engine.pipeline_cases import (
    WIDTH,
    batch,
    linear_stages,
    mse,
    results_of,
    rows,
    run_cases,
    worst_error,
)
from tests.hosts.network import Hosts

_ENV = {"GLOO_SOCKET_IFNAME": "eth0"}
_TOLERANCE = 1e-5
_CODED = CodecPolicy("int8", min_nbytes=0)


def raw(rank: int, size: int) -> float:
    return worst_error(rank, linear_stages(size), [batch(32), batch(48, seed=5)])


def interleaved(rank: int, size: int) -> float:
    return worst_error(
        rank, linear_stages(size), [batch(32)], schedule="gpipe", num_microbatches=16
    )


def quantized(rank: int, size: int) -> float:
    options = {"codec": _CODED, "grad_codec": _CODED}
    return worst_error(rank, linear_stages(size), [batch(32)], **options)


def coarse(rank: int, size: int) -> float:
    options = {"codec": _CODED, "grad_codec": CodecPolicy("int4", min_nbytes=0)}
    return worst_error(rank, linear_stages(size), [batch(32)], **options)


class _RaisesOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.has_raised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_raised:
            self.has_raised = True
            raise ValueError("boom")
        return self.linear(x)


def error_in_user_code(rank: int, size: int) -> str:
    stage: nn.Module = _RaisesOnce() if rank == 1 else nn.Linear(WIDTH, WIDTH)
    text = ""
    with pipecomm.Pipeline(stage, loss_fn=mse, timeout_s=20) as pipeline:
        try:
            pipeline.train_step(rows(32), rows(32, seed=2))
        except Exception as error:
            kind = "StageFailed" if isinstance(error, StageFailedError) else "own"
            text = f"{kind}: {error}"
        loss = pipeline.train_step(rows(32), rows(32, seed=2)).loss
    assert (loss is not None) == (rank == size - 1)
    return text


_CASES = (raw, interleaved, quantized, coarse, error_in_user_code)


@pytest.fixture(scope="module")
def mixed(hosts: Hosts) -> list[dict[str, Any]]:
    """Four ranks: the first two share a host, the others have one each."""
    by_rank: list[dict[str, Any]] = hosts.spawn([0, 0, 1, 2], run_cases, _CASES, env=_ENV)
    return by_rank


@pytest.mark.parametrize("case", [raw, interleaved])
def test_raw_pipeline_equals_the_unsplit_model(mixed: list[dict[str, Any]], case: Any) -> None:
    assert max(results_of(mixed, case)) < _TOLERANCE


@pytest.mark.parametrize(("case", "bound"), [(quantized, 0.05), (coarse, 0.5)])
def test_quantized_pipeline_is_near_it(
    mixed: list[dict[str, Any]], case: Any, bound: float
) -> None:
    worst = max(results_of(mixed, case))
    assert _TOLERANCE < worst < bound


def test_error_in_user_code_reaches_all_hosts_and_the_next_step_works(
    mixed: list[dict[str, Any]],
) -> None:
    texts = [by_case["error_in_user_code"] for by_case in mixed]
    assert texts[1] == "own: boom", texts[1]
    for rank in (0, 2, 3):
        assert texts[rank].startswith("StageFailed:"), texts[rank]
        assert "boom" in texts[rank]


def _train(rank: int, size: int, store_path: str) -> list[float]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size
    )
    torch.manual_seed(0)
    stage = [nn.Linear(256, 256) for _ in range(size)][rank]
    errors = []
    with pipecomm.Pipeline(stage, loss_fn=mse, num_microbatches=2, timeout_s=20) as pipeline:
        for step in range(3):
            shape = (256 * (step + 1), 256)
            pipeline.train_step(torch.ones(shape), torch.zeros(shape))
            errors.append(float(stage.weight.grad.norm()))
    dist.destroy_process_group()
    return errors


def test_messages_larger_than_the_room_on_a_slow_link_arrive(hosts: Hosts) -> None:
    hosts.shape(0, "1gbit")
    outcomes = hosts.spawn([0, 1], _train, env=_ENV)
    assert all(len(norms) == 3 and min(norms) > 0 for norms in outcomes)
