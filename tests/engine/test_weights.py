"""Versions of weights: which values the module has when, and what autograd and memory see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.weights import WeightVersions

USES = {0: 3, 1: 2, 2: 2, 3: 1}


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, 2.0)))


def adding(parameters: Any, number: float = 10.0) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            for one in parameters:
                one.add_(number)

    return step


def test_using_puts_a_version_there_and_leaves_it_until_another_is_asked_for() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight])
    versions.begin(USES)
    with versions.using(0):
        assert weight.item() == 1
    versions.update(0, adding([weight]))
    assert (weight.item(), versions.newest) == (11, 1)
    with versions.using(0):
        assert weight.item() == 1
    with versions.using(1):
        assert weight.item() == 11
    versions.end()
    assert weight.item() == 11


def test_update_goes_on_from_the_newest_whatever_is_installed() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight])
    versions.begin(USES)
    versions.update(0, adding([weight]))
    with versions.using(0):
        pass
    versions.update(1, adding([weight]))
    assert weight.item() == 21


def test_end_leaves_the_newest_even_after_an_error_in_an_old_one() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight])
    versions.begin(USES)
    versions.update(0, adding([weight]))
    with pytest.raises(ValueError, match="mine"), versions.using(0):
        raise ValueError("mine")
    assert weight.item() == 1
    versions.end()
    assert weight.item() == 11
    versions.end()


@pytest.mark.parametrize("version", [0, 2])
def test_version_that_is_gone_or_to_come_is_refused(version: int) -> None:
    weight = parameter()
    versions = WeightVersions([weight])
    versions.begin({0: 1, 1: 1})
    versions.update(0, adding([weight]))
    with pytest.raises(KeyError), versions.using(version):
        pass


def product(x: Tensor, weight: nn.Parameter) -> Tensor:
    """Saves the parameter itself for its backward, and a view of it too."""
    return (x * weight).sum() + nn.functional.linear(x, weight[None]).sum()


def test_backward_sees_the_version_of_its_forward() -> None:
    """Through views made then, which keep the old memory, and through the parameter itself."""
    weight, x = parameter(1.0, 2.0), torch.ones(1, 2, requires_grad=True)
    versions = WeightVersions([weight])
    versions.begin({0: 3, 1: 2})
    with versions.using(0):
        loss = product(x, weight)
    versions.update(0, adding([weight]))
    with versions.using(0):
        loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 4.0]]


def test_without_the_versions_autograd_refuses_such_a_backward() -> None:
    """Or the test above could not tell."""
    weight, x = parameter(), torch.ones(1, 2, requires_grad=True)
    loss = product(x, weight)
    adding([weight])()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_one_version_only_lets_a_backward_meet_newer_weights() -> None:
    weight, x = parameter(1.0, 2.0), torch.ones(1, 2, requires_grad=True)
    versions = WeightVersions([weight])
    versions.begin({0: 2, 1: 1})
    with versions.using(0):
        loss = product(x, weight)
    where = weight.data_ptr()
    versions.update(0, adding([weight]))
    assert (weight.data_ptr(), versions.most_kept) == (where, 1)
    with versions.using(1):
        loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[22.0, 24.0]]


def test_change_outside_of_an_update_is_still_refused_by_autograd() -> None:
    weight, x = parameter(), torch.ones(1, 2, requires_grad=True)
    versions = WeightVersions([weight])
    versions.begin({0: 3})
    with versions.using(0):
        loss = product(x, weight)
    adding([weight])()
    with versions.using(0), pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_nothing_is_copied_that_nobody_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = parameter()
    versions = WeightVersions([weight])
    versions.begin({0: 2, 1: 2, 2: 1})
    where = weight.data_ptr()
    for version in (0, 1):
        with versions.using(version):
            pass
        versions.update(version, adding([weight]))
    assert weight.data_ptr() == where


def test_two_versions_take_turns_in_two_memories() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight])
    # Batch t uses the version before the update of batch t-1, twice and for its own update.
    versions.begin({0: 6, 1: 3, 2: 3, 3: 3})
    seen = set()
    with versions.using(0), versions.using(0):
        pass
    versions.update(0, adding([weight]))
    for batch in range(1, 5):
        for _ in range(2):
            with versions.using(batch - 1):
                seen.add(weight.data_ptr())
                assert weight.item() == 1 + 10 * (batch - 1)
        versions.update(batch - 1, adding([weight]))
    assert (len(seen), versions.most_kept, versions.newest) == (2, 2, 5)


def test_parameters_stay_the_objects_they_are_and_keep_their_gradient() -> None:
    layer = nn.BatchNorm1d(2)
    versions = WeightVersions(layer.parameters())
    versions.begin({0: 3, 1: 1})
    before = dict(layer.named_parameters())
    with versions.using(0):
        layer(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum().backward()
    statistics = layer.running_mean.clone()  # type: ignore[union-attr]
    gradient = layer.weight.grad
    versions.update(0, adding(layer.parameters()))
    with versions.using(0):
        assert layer.weight.grad is gradient
        assert torch.equal(layer.running_mean, statistics)  # type: ignore[arg-type]
    after = dict(layer.named_parameters())
    assert all(after[name] is before[name] for name in before)


def test_a_parameter_named_twice_is_kept_once() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight, weight])
    versions.begin(USES)
    versions.update(0, adding([weight]))
    assert [storage.item() for storage in versions.storages(0)] == [1]
    assert [storage.item() for storage in versions.storages(1)] == [11]


def test_step_that_gives_a_parameter_other_memory_is_taken_as_it_is() -> None:
    weight = parameter(1.0)
    versions = WeightVersions([weight])
    versions.begin(USES)

    def step() -> None:
        weight.data = weight.data * 3

    versions.update(0, step)
    with versions.using(0):
        assert weight.item() == 1
    with versions.using(1):
        assert weight.item() == 3
