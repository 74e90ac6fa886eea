"""Stages in DDP, replicate and fully_shard: the gradients of the unsplit model, reduced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pipecomm.engine.pipeline import Pipeline
from pipecomm.errors import ConfigError
from tests.engine import data_parallel_cases as cases
from tests.engine.pipeline_cases import mse, results_of, rows, run_cases
from tests.ranks import spawn_ranks

CASES = (
    cases.steps_of_every_kind,
    cases.steps_with_split_backwards,
    cases.frozen_parameters,
    cases.recomputed_stages,
    cases.parameters_that_some_microbatches_use,
    cases.parameters_that_a_step_does_not_use,
    cases.accumulation_over_steps,
    cases.evaluation_in_between,
    cases.hybrid_shards,
    cases.a_failed_step_then_good_ones,
)
CLIPPED = (cases.clipped, cases.clipped_tensor_parallel)
COUNTS = (cases.collectives_of_a_step, cases.broadcasts_of_buffers)
ALL = (*CASES, *CLIPPED, *COUNTS, cases.parameters_that_ddp_waits_for_in_vain)
# Of values rounded to 16 bits on the way.
ROUNDED = 0.02
EXACT = 1e-5
# torch adds 1e-6 to the norm that it divides by.
CLIPPED_ERROR = 1e-4


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(cases.SIZE, run_cases, ALL, timeout_s=240)


@pytest.fixture
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_wrapped_stages_equal_the_unsplit_model(by_rank: Any, case: Any) -> None:
    for found in results_of(by_rank, case):
        wrong = {
            name: error
            for name, error in found.items()
            if not error < (ROUNDED if "float" in name else EXACT)
        }
        assert not wrong


@pytest.mark.parametrize("case", CLIPPED)
def test_gradients_cut_over_a_mesh_have_the_norm_of_the_unsplit_model(
    by_rank: Any, case: Any
) -> None:
    for found in results_of(by_rank, case):
        assert not {name: error for name, error in found.items() if not error < CLIPPED_ERROR}


def test_parameter_that_no_microbatch_uses_is_told_as_ddp_tells_it(by_rank: Any) -> None:
    for found in results_of(by_rank, cases.parameters_that_ddp_waits_for_in_vain):
        assert "find_unused_parameters=True" in found["raised"]
        assert found["error"] < EXACT


def test_reductions_happen_once_in_a_step(by_rank: Any) -> None:
    expected = {f"{wrap.__name__} {word}": n for (wrap, word), n in cases.COLLECTIVES.items()}
    expected |= {"as_ddp allreduce split": 1, "as_ddp_finding_unused allreduce split": 2}
    for found in results_of(by_rank, cases.collectives_of_a_step):
        assert found == expected


def test_buffers_are_broadcast_once_in_a_step(by_rank: Any) -> None:
    # One for each of their dtypes.
    assert results_of(by_rank, cases.broadcasts_of_buffers) == [2] * cases.SIZE


def fsdp1(stage: nn.Module) -> nn.Module:
    """As far as it can be made: its constructor asks for an accelerator."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    return wrapper


def delayed(stage: nn.Module) -> nn.Module:
    weight = next(stage.parameters())
    return DistributedDataParallel(
        stage,
        delay_all_reduce_named_params=[("weight", weight)],
        param_to_hook_all_reduce=weight,
    )


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (fsdp1, "fully_shard"),
        (lambda stage: DistributedDataParallel(stage, static_graph=True), "static_graph"),
        (delayed, "delay_all_reduce_named_params"),
    ],
)
def test_wrappers_that_cannot_wait_are_refused_by_name_when_constructed(
    wrap: Callable[[nn.Module], nn.Module], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Pipeline(nn.Sequential(wrap(nn.Linear(4, 4))))


@pytest.mark.usefixtures("_world")
def test_uneven_inputs_are_refused_when_a_step_begins() -> None:
    stage = DistributedDataParallel(nn.Linear(4, 4))
    pipeline = Pipeline(stage, loss_fn=mse)
    with Join([stage]), pytest.raises(ConfigError, match="Join"):
        pipeline.train_step(rows(2, shape=(4,)), rows(2, shape=(4,)))


@pytest.mark.usefixtures("_world")
def test_replicate_with_a_static_graph_is_refused_when_a_step_begins() -> None:
    stage = replicate(nn.Linear(4, 4), static_graph=True)
    with Pipeline(stage, loss_fn=mse) as pipeline, pytest.raises(ConfigError, match="static"):
        pipeline.train_step(rows(2, shape=(4,)), rows(2, shape=(4,)))
