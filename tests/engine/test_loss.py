"""The loss of a batch from the losses of its microbatches."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomm.engine.loss import LossRule, StepLoss, loss_weights
from pipecomm.engine.microbatch import split_step
from pipecomm.errors import ConfigError


def add(output: Tensor, target: Any) -> Tensor:
    return output.sum() + (0 if target is None else target.sum())


def test_mean_weighs_by_rows_and_sum_does_not() -> None:
    data = split_step(torch.zeros(8), None, None, 3)
    assert loss_weights(data, "mean", None) == [3 / 8, 3 / 8, 2 / 8]
    assert loss_weights(data, "sum", None) == [1, 1, 1]


@pytest.mark.parametrize("divisor", [16, 16.0, torch.tensor(16)])
def test_divisor_divides_every_weight(divisor: Any) -> None:
    data = split_step(torch.zeros(4), None, None, 2)
    assert loss_weights(data, "mean", divisor) == [1 / 32, 1 / 32]
    assert loss_weights(data, "sum", divisor) == [1 / 16, 1 / 16]


def test_microbatches_of_an_update_are_a_batch_of_their_own() -> None:
    data = split_step(torch.zeros(8), None, None, 3)
    assert loss_weights(data, "mean", None, (1, 2)) == [0.5, 0.5, 1.0]
    assert loss_weights(data, "mean", 2, (0, 2)) == [0.5, 0.3, 0.2]
    assert loss_weights(data, "sum", None, (1, 2)) == [1, 1, 1]


@pytest.mark.parametrize("divisor", [0, -2.0, float("nan"), float("inf"), torch.tensor(0)])
def test_divisor_that_cannot_divide_is_refused(divisor: Any) -> None:
    data = split_step(torch.zeros(4), None, None, 2)
    with pytest.raises(ConfigError, match="loss_divisor"):
        loss_weights(data, "sum", divisor)


def test_total_is_the_weighted_sum_in_any_order() -> None:
    loss = StepLoss(add, [torch.ones(1), torch.zeros(1)], [0.75, 0.25], keep_outputs=False)
    assert loss.total() is None
    assert loss(1, torch.tensor([4.0])).item() == 1.0
    assert loss(0, torch.tensor([1.0])).item() == 1.5
    assert loss.total() == 2.5
    assert loss.outputs() is None


def test_loss_of_one_element_counts_as_scalar() -> None:
    loss = StepLoss(lambda output, target: output, [None], [1.0], keep_outputs=False)
    loss(0, torch.full((1, 1), 3.0))
    assert loss.total() == 3.0


def test_outputs_are_detached_and_in_order_of_microbatches() -> None:
    loss = StepLoss(None, [None, None], [0.5, 0.5], keep_outputs=True)
    outputs = [{"y": torch.ones(1, requires_grad=True) * i, "n": (i, [])} for i in range(2)]
    assert loss(1, outputs[1]) is None
    assert loss(0, outputs[0]) is None
    assert loss.total() is None
    kept = loss.outputs()
    assert [part["y"].item() for part in kept] == [0, 1]
    assert [part["n"] for part in kept] == [(0, []), (1, [])]
    assert not any(part["y"].requires_grad for part in kept)


def test_outputs_in_any_container_are_detached() -> None:
    loss = StepLoss(None, [None], [1.0], keep_outputs=True)
    loss(0, UserDict(a=OrderedDict(b=torch.ones(1, requires_grad=True) * 2)))
    (kept,) = loss.outputs()
    assert type(kept) is UserDict
    assert type(kept["a"]) is OrderedDict
    assert kept["a"]["b"].grad_fn is None


def test_outputs_that_cannot_be_detached_are_refused_by_type_and_path() -> None:
    loss = StepLoss(None, [None], [1.0], keep_outputs=True)
    loss(0, SimpleNamespace(logits=torch.ones(1)))
    with pytest.raises(TypeError, match=r"SimpleNamespace, which holds one at \.logits"):
        loss(0, SimpleNamespace(logits=torch.ones(1, requires_grad=True)))


@pytest.mark.parametrize("value", [torch.ones(2), 1.5, None, "text"])
def test_loss_that_is_no_number_in_a_tensor_is_refused(value: Any) -> None:
    loss = StepLoss(lambda output, target: value, [None], [1.0], keep_outputs=False)
    with pytest.raises(TypeError, match="one element from loss_fn"):
        loss(0, torch.ones(1))


def test_backward_starts_from_one_for_each_loss_once() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = StepLoss(lambda output, target: output.sum(), [None], [0.5], keep_outputs=False)
    loss(0, x)
    assert torch.equal(loss.start_gradient(0), torch.ones(()))
    with pytest.raises(KeyError):
        loss.start_gradient(0)


def test_scale_is_for_the_backward_and_the_loss_that_of_one_batch() -> None:
    loss = StepLoss(add, [None, None], [1, 1], keep_outputs=False, scale=8.0, num_batches=2)
    for microbatch, value in enumerate((3.0, 5.0)):
        loss(microbatch, torch.tensor([value], requires_grad=True))
    assert loss.start_gradient(1).item() == 8
    assert loss.total() == 4


def test_complex_loss_is_refused() -> None:
    loss = StepLoss(lambda output, target: output, [None], [1.0], keep_outputs=False)
    with pytest.raises(TypeError, match=r"a real number from loss_fn; got torch\.complex64"):
        loss(0, torch.ones((), dtype=torch.complex64))


@pytest.mark.parametrize(
    ("reduction", "updates", "total", "start"),
    [("mean", (), 2.5, 1.0), ("mean", (1, 3), 2.5, 4.0), ("sum", (1, 3), 10.0, 4.0)],
)
def test_rule_scales_and_averages_where_updates_come_within_the_step(
    reduction: Any, updates: tuple[int, ...], total: float, start: float
) -> None:
    data = split_step(torch.arange(4.0) + 1, None, None, 4)
    rule = LossRule(lambda output, target: output.sum(), reduction, scale=4.0)
    loss = rule.of_step(data, updates, None, is_here=True, keep_outputs=True)
    for microbatch, (inputs,) in enumerate(data.inputs):
        loss(microbatch, inputs.clone().requires_grad_())
    assert loss.total() == pytest.approx(total)
    assert loss.start_gradient(0) == start
    assert len(loss.outputs() or []) == 4


def test_rule_leaves_outputs_and_divisor_to_the_last_stage() -> None:
    data = split_step(torch.zeros(2), None, None, 1)
    rule = LossRule(None, "mean")
    # Where it is not needed nobody looks at it, nor waits for its device.
    loss = rule.of_step(data, (), -1.0, is_here=False, keep_outputs=True)
    assert loss.outputs() is None
    with pytest.raises(ConfigError, match="loss_divisor"):
        rule.of_step(data, (), -1.0, is_here=True, keep_outputs=True)
