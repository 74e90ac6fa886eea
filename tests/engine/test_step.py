"""A step carries out its plan's actions; between stages of one rank results stay in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.loss import StepLoss, loss_weights
from pipecomm.engine.microbatch import split_step
from pipecomm.engine.plan import Plan, evaluation_plan, training_plan
from pipecomm.engine.stage import Stage
from pipecomm.engine.step import Step
from pipecomm.schedule import Action, Placement, Schedule

INPUTS, TARGETS = torch.randn(4, 3), torch.randn(4, 3)
CPU = torch.device("cpu")


def plan_of(row: str) -> Plan:
    actions = [Action.parse(text) for text in row.split()]
    return training_plan(Schedule.from_lists("mine", [actions]), 0)


def step_of(plan: Plan, modules: list[nn.Module]) -> tuple[Step, StepLoss]:
    stages = {index: Stage(module, index, len(modules)) for index, module in enumerate(modules)}
    data = split_step(INPUTS, TARGETS, None, plan.num_microbatches)
    weights = loss_weights(data, "mean", None)
    loss = StepLoss(nn.functional.mse_loss, data.targets, weights, keep_outputs=True)
    return Step(plan, stages, None, {}, data, loss, CPU), loss


@pytest.mark.parametrize(
    "row",
    ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", "0F0 0F1 1F0 1F1 1B1 1B0 0B0 0B1"],
    ids=["one after the other", "together"],
)
def test_stages_of_one_rank_train_as_the_unsplit_model(row: str) -> None:
    modules: list[nn.Module] = [nn.Linear(3, 5), nn.Linear(5, 3)]
    whole = copy.deepcopy(nn.Sequential(*modules))
    expected = nn.functional.mse_loss(whole(INPUTS), TARGETS)
    expected.backward()
    step, loss = step_of(plan_of(row), modules)
    step.run()
    step.drain()
    assert loss.total() == pytest.approx(expected.item())
    for one, other in zip(nn.Sequential(*modules).parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    assert step.current is None
    assert [event.name for event in step.stats.events] == row.split()


def test_evaluation_leaves_no_gradient() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 5), nn.Linear(5, 3)]
    step, loss = step_of(evaluation_plan(Placement((0, 0)), 2, 0), modules)
    step.run()
    outputs = loss.outputs()
    assert outputs is not None
    assert torch.equal(torch.cat(outputs), nn.Sequential(*modules)(INPUTS))
    assert all(one.grad is None for module in modules for one in module.parameters())


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("boom")


def test_step_that_fails_says_where_it_was() -> None:
    step, _ = step_of(plan_of("0F0 1F0 1B0 0B0"), [nn.Linear(3, 3), _Fails()])
    with pytest.raises(RuntimeError, match="boom"):
        step.run()
    assert str(step.current) == "1F0"
    assert step.stats.step_s == 0
