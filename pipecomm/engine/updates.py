"""The updates of one stage in an asynchronous step: from gradients to the next version.

Knows the optimizer, the scale of the loss, clipping and compensation; not when an update is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pipecomm.engine.compensation import Compensation, Compensator
from pipecomm.engine.data_parallel import is_wrapped
from pipecomm.engine.weights import WeightVersions
from pipecomm.errors import ConfigError
from pipecomm.schedule import Weights

__all__ = ["StageUpdates", "Updates", "UpdatesWeights", "check_optimizer", "updates_of_stages"]


class UpdatesWeights(Protocol):
    """What is asked of an optimizer: torch.optim.Optimizer has it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...


@dataclass(frozen=True)
class Updates:
    """How an asynchronous schedule updates weights; the same on every rank.

    compensation: of gradients that come late: "none", "dc", "nesterov" or "feedback", each also
        as "name:strength" (Compensation).
    max_norm: a stage's gradients are scaled in place before its update if their 2-norm is larger.
        Of the stage alone: a norm over all stages would have to wait for all of them.
    loss_scale: the loss is multiplied by it and gradients are divided by it before the update. An
        update whose gradients are not finite is left out, on its stage.

    Raises ConfigError for values that mean nothing.
    """

    compensation: str = "none"
    max_norm: float | None = None
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        Compensation.parse(self.compensation)
        for name, value in (("max_norm", self.max_norm), ("loss_scale", self.loss_scale)):
            is_number = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
            if value is not None and not is_number:
                raise ConfigError(f"expected a finite number above 0 as {name}; got {value!r}")

    @property
    def rule(self) -> Compensation:
        return Compensation.parse(self.compensation)


class StageUpdates:
    """Of stage `index` with `module`; `options` hold for all steps, the optimizer for one."""

    def __init__(self, module: nn.Module, index: int, options: Updates) -> None:
        self._index = index
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._options = options
        self._compensator = Compensator(options.rule, self._parameters)
        self._optimizer: UpdatesWeights | None = None
        self.versions = WeightVersions(self._parameters)

    def begin(self, optimizer: UpdatesWeights, uses: Mapping[int, int]) -> None:
        """A step begins; `uses` as in WeightVersions.begin(). Gradients are cleared.

        Raises ConfigError for an optimizer of none of the stage's parameters.
        """
        if self._parameters and not set(self._parameters) & set(_parameters_of(optimizer)):
            raise ConfigError(
                f"expected an optimizer of the parameters of stage {self._index}; got one of "
                f"{len(_parameters_of(optimizer))} others. Each rank gives the optimizer of its own"
            )
        self._optimizer = optimizer
        self.versions.begin(uses)
        self._compensator.begin()
        self._clear()

    def update(self, version: int) -> bool:
        """Make the next version from the gradients in .grad, which were computed with `version`.

        Clears the gradients. False if they were not finite and nothing has changed.
        """
        self.versions.show_newest()
        is_finite = self._unscale()
        if is_finite:
            old = self.versions.storages(version)
            self._compensator.apply(version, self.versions.newest, old)
        self.versions.update(version, self._step if is_finite else _nothing)
        self._clear()
        return is_finite

    def end(self) -> None:
        """The step is over or given up; the parameters have their newest values."""
        self.versions.end()
        self._optimizer = None

    def _unscale(self) -> bool:
        """False where a scaled loss has left gradients that are not finite."""
        if self._options.loss_scale == 1.0:
            return True
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_div_(gradients, self._options.loss_scale)
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _step(self) -> None:
        assert self._optimizer is not None
        if self._options.max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._options.max_norm)
        with _hidden_gradients(set(_parameters_of(self._optimizer)) - set(self._parameters)):
            self._optimizer.step()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def updates_of_stages(
    modules: Mapping[int, nn.Module], weights: Weights, options: Updates | None
) -> dict[int, StageUpdates]:
    """By stage, for a schedule with `weights`; none where it is not asynchronous.

    Raises ConfigError for options that the schedule has no use for, data-parallel wrappers, and
    parameters that two of the stages share.
    """
    if weights is Weights.ONE:
        if options is not None:
            raise ConfigError(
                f"expected updates only with an asynchronous schedule; got {options}. After a step "
                "of this one, clip and call the optimizer's step() yourself"
            )
        return {}
    options = options or Updates()
    if options.rule.needs_old_weights and weights is Weights.NEWEST:
        raise ConfigError(
            f'expected a schedule that keeps old weights for compensation "{options.compensation}"'
            '; got one that uses the newest; use "nesterov" or "feedback", or pipedream'
        )
    owners: dict[nn.Parameter, int] = {}
    for index, module in modules.items():
        if is_wrapped(module):
            raise ConfigError(
                f"expected stage {index} without data-parallel wrappers in an asynchronous "
                "schedule, whose updates would each need a reduction; use a synchronous one"
            )
        for parameter in module.parameters():
            owner = owners.setdefault(parameter, index)
            if owner != index:
                raise ConfigError(
                    f"expected parameters of one stage each in an asynchronous schedule; got one "
                    f"of stages {owner} and {index}, which have different versions at a time"
                )
    return {index: StageUpdates(module, index, options) for index, module in modules.items()}


def check_optimizer(optimizer: Any, *, is_asynchronous: bool) -> None:
    """Raise ConfigError unless train_step has an optimizer exactly where it updates weights."""
    if not is_asynchronous and optimizer is not None:
        raise ConfigError(
            "expected no optimizer for train_step with a synchronous schedule, which updates "
            "nothing; got one. Call its step() after train_step"
        )
    has_all = hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")
    if is_asynchronous and not has_all:
        raise ConfigError(
            "expected train_step(..., optimizer=) with an asynchronous schedule, which updates "
            f"weights within the step; got {optimizer!r}"
        )


def _nothing() -> None:
    pass


def _parameters_of(optimizer: UpdatesWeights) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def _hidden_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """An optimizer skips what has no gradient: other stages, which are not done yet."""
    hidden = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    yield
    for parameter, gradient in hidden:
        parameter.grad = gradient
