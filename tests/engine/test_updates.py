"""Updates of one stage: the optimizer's step, the scale of the loss, clipping, other stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecomm.engine.updates import StageUpdates, Updates
from pipecomm.errors import ConfigError

LR = 0.5


def stage(weight: float = 1.0) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([weight, weight]))
    return module


def begun(module: nn.Module, options: Updates | None = None, **uses: int) -> StageUpdates:
    updates = StageUpdates(module, 2, options or Updates())
    updates.begin(torch.optim.SGD(module.parameters(), lr=LR), {0: 9, 1: 9, 2: 9})
    return updates


def test_update_is_the_optimizers_step_and_clears_the_gradients() -> None:
    module = stage()
    module.weight.grad = torch.ones(2)
    updates = begun(module)
    assert module.weight.grad is None
    module.weight.grad = torch.tensor([1.0, 2.0])
    updates.update(0)
    assert module.weight.tolist() == [0.5, 0.0]
    assert module.weight.grad is None
    with updates.versions.using(0):
        assert module.weight.tolist() == [1.0, 1.0]
    updates.end()
    assert module.weight.tolist() == [0.5, 0.0]


def test_optimizers_state_goes_on_through_versions() -> None:
    module, other = stage(), stage()
    updates = StageUpdates(module, 0, Updates())
    updates.begin(torch.optim.AdamW(module.parameters(), lr=LR), {0: 9, 1: 9})
    plain = torch.optim.AdamW(other.parameters(), lr=LR)
    for version in range(3):
        for one in (module, other):
            one.weight.grad = torch.tensor([1.0, 0.25]) * (version + 1)
        with updates.versions.using(0):
            pass
        updates.update(version)
        plain.step()
        assert torch.equal(module.weight, other.weight)


def test_gradients_are_divided_by_the_scale_of_the_loss() -> None:
    module = stage()
    updates = begun(module, Updates(loss_scale=4.0))
    module.weight.grad = torch.tensor([4.0, 8.0])
    updates.update(0)
    assert module.weight.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_update_with_gradients_that_are_not_finite_is_left_out(value: float) -> None:
    module = stage()
    updates = begun(module, Updates(loss_scale=4.0))
    module.weight.grad = torch.tensor([4.0, value])
    assert not updates.update(0)
    assert module.weight.tolist() == [1.0, 1.0]
    assert (updates.versions.newest, module.weight.grad) == (1, None)
    module.weight.grad = torch.tensor([4.0, 8.0])
    assert updates.update(1)
    assert module.weight.tolist() == [0.5, 0.0]


def test_without_a_scale_what_is_not_finite_is_the_optimizers_matter() -> None:
    module = stage()
    updates = begun(module)
    module.weight.grad = torch.tensor([float("inf"), 0.0])
    updates.update(0)
    assert module.weight[0].isinf()


def test_gradients_are_clipped_by_the_norm_of_the_stage() -> None:
    module = stage()
    updates = begun(module, Updates(max_norm=1.0))
    module.weight.grad = torch.tensor([3.0, 4.0])
    updates.update(0)
    torch.testing.assert_close(module.weight.data, torch.tensor([0.7, 0.6]), rtol=1e-5, atol=0)
    module.weight.grad = torch.tensor([0.3, 0.4])
    before = module.weight.data.clone()
    updates.update(1)
    torch.testing.assert_close(module.weight.data, before - LR * torch.tensor([0.3, 0.4]))


def test_clipping_bounds_what_compensation_has_made() -> None:
    module = stage()
    updates = begun(module, Updates("nesterov:0.5", max_norm=1.0))
    module.weight.grad = torch.tensor([3.0, 4.0])
    updates.update(0)
    assert (module.weight.data - 1).norm().item() == pytest.approx(LR, rel=1e-4)


def test_compensation_meets_the_values_of_the_old_version() -> None:
    module = stage(2.0)
    updates = begun(module, Updates("dc:0.5"))
    module.weight.grad = torch.tensor([2.0, 2.0])
    updates.update(0)
    assert module.weight.tolist() == [1.0, 1.0]
    module.weight.grad = torch.tensor([1.0, 2.0])
    updates.update(0)
    # g + 0.5 g g (1 - 2): 1 - 0.5, 2 - 2.
    assert module.weight.tolist() == [1.0 - LR * 0.5, 1.0]


def test_gradients_of_other_stages_of_the_optimizer_stay_as_they_are() -> None:
    module, other = stage(), stage()
    updates = StageUpdates(module, 0, Updates())
    updates.begin(torch.optim.SGD([module.weight, other.weight], lr=LR), {0: 9})
    module.weight.grad, other.weight.grad = torch.ones(2), torch.ones(2)
    updates.update(0)
    assert module.weight.tolist() == [0.5, 0.5]
    assert other.weight.tolist() == [1.0, 1.0]
    assert other.weight.grad is not None


def test_optimizer_of_other_parameters_is_refused_with_the_stage() -> None:
    updates = StageUpdates(stage(), 2, Updates())
    with pytest.raises(ConfigError, match="expected an optimizer of the parameters of stage 2"):
        updates.begin(torch.optim.SGD(stage().parameters(), lr=LR), {})


def test_stage_without_parameters_needs_no_optimizer_of_its_own() -> None:
    updates = StageUpdates(nn.ReLU(), 0, Updates())
    updates.begin(torch.optim.SGD(stage().parameters(), lr=LR), {0: 1})
    updates.update(0)
    assert updates.versions.newest == 1


@pytest.mark.parametrize(
    "options",
    [
        {"compensation": "magic"},
        {"max_norm": 0},
        {"max_norm": float("inf")},
        {"loss_scale": -1.0},
        {"loss_scale": "big"},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Updates(**options)
