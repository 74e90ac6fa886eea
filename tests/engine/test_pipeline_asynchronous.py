"""Asynchronous pipelines: bit for bit the weights of a plain loop that follows the same rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.updates import Updates
from pipecomm.errors import ConfigError, StageFailedError
from pipecomm.schedule import Action, Schedule, Weights, build
from tests.engine import asynchronous_cases as cases
from tests.engine.pipeline_cases import WIDTH, CasesBySize, mse

NAMES = ("pipedream", "pipedream-2bw", "paci")


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(cases.CASES)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_rule(results: Any, size: int, name: str, optimizer: str) -> None:
    assert all(found[f"{name}, {optimizer}"] for found in results(size, cases.follows))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rule", cases.CHANGES)
@pytest.mark.parametrize("name", NAMES[:2])
def test_weights_are_those_of_the_compensated_rule(
    results: Any, size: int, name: str, rule: str
) -> None:
    assert all(found[f"{name}, {rule}"] for found in results(size, cases.compensated))


@pytest.mark.parametrize("size", [2, 4])
def test_statistics_of_batch_norm_have_no_versions(results: Any, size: int) -> None:
    for found in results(size, cases.with_buffers):
        assert found == {"weights": True, "buffers": True}


@pytest.mark.parametrize("size", [2, 4])
def test_rules_differ_from_training_without_delay(results: Any, size: int) -> None:
    """Or the tests above could not tell."""
    assert all(results(size, cases.rules_differ))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_result_has_the_mean_loss_and_the_versions_that_the_schedule_says(
    results: Any, size: int, name: str
) -> None:
    for found in results(size, cases.results):
        kept, said, loss, expected = found[name]
        assert kept == said
        assert loss == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_peak_of_live_activations_is_what_the_schedule_says(
    results: Any, size: int, name: str
) -> None:
    for found in results(size, cases.live_activations):
        measured, said, left = found[name]
        assert (measured, left) == (said, 0)


def test_step_ends_drained_and_evaluation_has_the_newest_weights(results: Any) -> None:
    for found in results(2, cases.two_steps_then_evaluation):
        assert found == {"weights": True, "evaluation": True}


def test_updates_are_clipped_by_stage_and_a_scaled_loss_is_unscaled(results: Any) -> None:
    assert max(results(2, cases.clipped_and_scaled)) < 1e-4


def test_error_leaves_the_newest_weights_and_a_pipeline_that_works(results: Any) -> None:
    first, last = results(2, cases.error_in_the_midst)
    assert type(last["failed"].error) is ValueError
    assert isinstance(first["failed"].error, StageFailedError)
    assert first["is_clean"]
    assert last["is_clean"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "with an asynchronous schedule, which updates weights within the step; got None"),
        ("synchronous", "expected no optimizer for train_step with a synchronous schedule"),
        ("others", "expected an optimizer of the parameters of stage"),
        ("differ", "expected the same settings on every rank"),
    ],
)
def test_wrong_use_is_refused_on_every_rank(results: Any, name: str, text: str) -> None:
    for found in results(2, cases.refused):
        error = found[name].error
        assert isinstance(error, (ConfigError, StageFailedError))
        assert text in str(error)


def test_one_rank_trains_without_delay() -> None:
    torch.manual_seed(0)
    layer, plain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    plain.load_state_dict(layer.state_dict())
    optimizer = cases.sgd(plain.parameters())
    inputs, targets = map(list, zip(*cases.data(), strict=True))
    with Pipeline(layer, schedule="pipedream", num_microbatches=len(inputs),
                  loss_fn=mse) as pipeline:  # fmt: skip
        assert pipeline.is_asynchronous
        pipeline.train_step(inputs, targets, optimizer=cases.sgd(layer.parameters()))
    for x, target in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        mse(plain(x), target).backward()
        optimizer.step()
    assert torch.equal(layer.weight, plain.weight)


def test_split_backwards_may_be_asynchronous() -> None:
    rows = ["0F0 0I0 0F1 0I1 0W0 0U0 0W1 0U1"]
    lists = [map(Action.parse, row.split()) for row in rows]
    schedule = Schedule.from_lists("mine", lists, Weights.STASHED)
    layer = nn.Linear(WIDTH, WIDTH)
    before = layer.weight.detach().clone()
    (x, target), (x1, target1) = cases.data()[:2]
    gradients = []
    for one, wanted in ((x, target), (x1, target1)):
        (gradient,) = torch.autograd.grad(mse(layer(one), wanted), layer.weight)
        gradients.append(gradient)
    with Pipeline(layer, schedule=schedule, loss_fn=mse) as pipeline:
        given = ([x, x1], [target, target1])
        pipeline.train_step(*given, optimizer=cases.sgd(layer.parameters()))
    expected = torch.add(torch.add(before, gradients[0], alpha=-0.3), gradients[1], alpha=-0.3)
    torch.testing.assert_close(layer.weight.data, expected)


def test_update_with_gradients_that_are_not_finite_is_counted() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    inputs, targets = map(list, zip(*cases.data(), strict=True))
    inputs[3] = inputs[3] * float("inf")
    with Pipeline(layer, schedule="pipedream", num_microbatches=len(inputs), loss_fn=mse,
                  updates=Updates(loss_scale=2.0)) as pipeline:  # fmt: skip
        result = pipeline.train_step(inputs, targets, optimizer=cases.sgd(layer.parameters()))
    assert result.stats.updates_left_out == 1
    assert layer.weight.isfinite().all()


def test_options_that_a_schedule_has_no_use_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected updates only with an asynchronous schedule"):
        Pipeline(nn.Linear(2, 2), updates=Updates())
    with pytest.raises(ConfigError, match='keeps old weights for compensation "dc"'):
        Pipeline(nn.Linear(2, 2), schedule="paci", updates=Updates("dc"))


def test_parameters_of_two_stages_are_refused() -> None:
    rows = ["0F0 1F0 1B0 1U0 0B0 0U0"]
    schedule = Schedule.from_lists("mine", [map(Action.parse, row.split()) for row in rows])
    layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="of stages 0 and 1, which have different versions"):
        Pipeline([layer, layer], schedule=schedule, loss_fn=mse)


def test_data_parallel_wrappers_are_refused(tmp_path: Any) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="without data-parallel wrappers"):
            Pipeline(wrapped, schedule=build("pipedream", 1, 2), loss_fn=mse)
    finally:
        dist.destroy_process_group()
