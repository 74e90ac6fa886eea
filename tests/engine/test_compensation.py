"""The rules for late gradients, each against its formula on numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecomm.engine.compensation import Compensation, Compensator
from pipecomm.errors import ConfigError


class Trial:
    """One parameter of two values; gradients go in, what a rule has made of them comes out."""

    def __init__(self, rule: str) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.compensator = Compensator(Compensation.parse(rule), [self.weight])
        self.compensator.begin()

    def __call__(
        self, gradient: list[float], version: int, newest: int, old: tuple[float, float] = (1, 1)
    ) -> list[float]:
        self.weight.grad = torch.tensor(gradient)
        self.compensator.apply(version, newest, [torch.tensor(old)])
        result: list[float] = self.weight.grad.tolist()
        return result


def test_none_changes_nothing() -> None:
    assert Trial("none")([1.0, 2.0], 0, 3, (5.0, 5.0)) == [1.0, 2.0]


def test_dc_adds_the_change_of_the_weights_times_the_gradient_squared() -> None:
    # The newest is 1; 0.5 * g * g * (1 - old).
    assert Trial("dc:0.5")([2.0, 4.0], 0, 1, (0.0, 2.0)) == [2 + 2.0, 4 - 8.0]


def test_dc_leaves_a_gradient_that_is_not_late_as_it_is() -> None:
    assert Trial("dc:0.5")([2.0, 4.0], 1, 1) == [2.0, 4.0]


def test_nesterov_looks_ahead_by_its_momentum_which_goes_on_in_the_next_step() -> None:
    trial = Trial("nesterov:0.5")
    assert trial([4.0, 0.0], 0, 0) == [4 + 0.5 * 4, 0]
    trial.compensator.begin()
    # m = 0.5 * 4 + 2
    assert trial([2.0, 0.0], 0, 1) == [2 + 0.5 * 4, 0]


def test_nesterov_is_sgds_of_torch() -> None:
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    compensator = Compensator(Compensation.parse("nesterov:0.9"), [ours])
    plain = torch.optim.SGD([ours], lr=0.1)
    nesterov = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for update in range(5):
        for one in (ours, theirs):
            one.grad = torch.tensor([0.5, 1.0]) * (update + 1)
        compensator.apply(update, update, [ours])
        plain.step()
        nesterov.step()
        torch.testing.assert_close(ours.data, theirs.data)


def test_feedback_adds_the_error_of_the_update_that_the_gradient_was_missing_in() -> None:
    trial = Trial("feedback:0.5")
    assert trial([4.0, 0.0], 0, 0) == [4, 0]
    # Was computed with version 0, which 4 has updated: 2 + 0.5 (2 - 4).
    assert trial([2.0, 0.0], 0, 1) == [1, 0]
    # With version 1, which 1 has updated: 3 + 0.5 (3 - 1).
    assert trial([3.0, 0.0], 1, 2) == [4, 0]


def test_feedback_has_nothing_to_add_to_gradients_that_are_not_late() -> None:
    trial = Trial("feedback:0.5")
    assert [trial([g, 0.0], n, n)[0] for n, g in enumerate([4.0, 2.0, 3.0])] == [4, 2, 3]


def test_feedback_forgets_what_nothing_will_be_compared_with() -> None:
    trial = Trial("feedback:0.5")
    for newest in range(6):
        trial([1.0, 1.0], max(0, newest - 2), newest)
        assert len(trial.compensator._applied) <= 3
    trial.compensator.begin()
    assert trial([2.0, 0.0], 3, 0) == [2.0, 0.0]


def test_parameter_without_a_gradient_is_passed_over() -> None:
    for rule in ("dc", "nesterov", "feedback"):
        trial = Trial(rule)
        trial.compensator.apply(0, 0, [torch.zeros(2)])
        assert trial.weight.grad is None


@pytest.mark.parametrize(
    ("text", "name", "strength"),
    [("none", "none", 0.0), ("dc", "dc", 0.04), ("dc:2", "dc", 2.0), ("feedback:0", "feedback", 0)],
)
def test_rule_is_read_from_text(text: str, name: str, strength: float) -> None:
    assert Compensation.parse(text) == Compensation(name, strength)


@pytest.mark.parametrize(
    "text", ["", "sgd", "dc:", "dc:-1", "dc:much", "nesterov:1", "feedback:1.5", "none:1", None]
)
def test_other_texts_are_refused(text: object) -> None:
    if text == "dc:":
        assert Compensation.parse(text) == Compensation.parse("dc")
    else:
        with pytest.raises(ConfigError, match="expected"):
            Compensation.parse(text)
