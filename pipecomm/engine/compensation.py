"""What is done, before an update, about gradients of weights that are no longer the newest.

One rule, applied to one stage. All of them change .grad and leave the optimizer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipecomm.errors import ConfigError

__all__ = ["Compensation", "Compensator"]

# Name -> strength where none is given; the range that a strength may be in ends before 1 where
# it is a share.
_DEFAULTS = {"none": 0.0, "dc": 0.04, "nesterov": 0.9, "feedback": 0.5}
_SHARES = {"nesterov", "feedback"}


@dataclass(frozen=True)
class Compensation:
    """A rule and its strength, as text `name` or `name:strength`.

    g is a gradient, computed with version v of the weights, that is to update version w.

    none: g.
    dc: g + strength * g * g * (W(w) - W(v)), a first-order guess of what g would be at w (Zheng et
        al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017).
    nesterov: g + strength * m with m the momentum, strength * m + g: a step ahead, as the weights
        will be when the next gradients come (after Ajanthan et al., Nesterov Method for
        Asynchronous Pipeline Parallel Optimization, 2025, who do so inside NAdam).
    feedback: g + strength * (g - u), with u what updated version v, for lack of g: the error
        made then, now that it is known. This form of error feedback is our own.
    """

    name: str = "none"
    strength: float = 0.0

    @classmethod
    def parse(cls, text: object) -> Compensation:
        """Raises ConfigError for an unknown name and a strength out of its range."""
        name, _, number = str(text).partition(":")
        if not isinstance(text, str) or name not in _DEFAULTS:
            raise ConfigError(f"expected a compensation of {', '.join(_DEFAULTS)}; got {text!r}")
        try:
            strength = float(number) if number else _DEFAULTS[name]
        except ValueError:
            strength = -1.0
        limit = 1.0 if name in _SHARES else float("inf")
        if not 0 <= strength < limit or (number and name == "none"):
            raise ConfigError(
                f'expected compensation "{name}" or "{name}:strength" with a strength from 0 to '
                f"less than {limit}; got {text!r}"
            )
        return cls(name, strength)

    @property
    def needs_old_weights(self) -> bool:
        """Whether it compares the version of the gradient with the newest."""
        return self.name == "dc"


class Compensator:
    """Applies a rule to the gradients of `parameters`, update after update."""

    def __init__(self, rule: Compensation, parameters: Sequence[nn.Parameter]) -> None:
        self._rule = rule
        self._parameters = tuple(parameters)
        self._momenta: dict[nn.Parameter, Tensor] = {}
        # By the version that they have updated.
        self._applied: dict[int, dict[nn.Parameter, Tensor]] = {}

    def begin(self) -> None:
        """A step begins, with version 0; the momentum goes on."""
        self._applied.clear()

    @torch.no_grad()
    def apply(self, version: int, newest: int, old: Sequence[Tensor]) -> None:
        """Change the gradients, computed with `version`, whose values are `old`, for `newest`."""
        change = {"none": None, "dc": self._correct, "nesterov": self._look_ahead,
                  "feedback": self._feed_back}[self._rule.name]  # fmt: skip
        if change is None:
            return
        for parameter, weights in zip(self._parameters, old, strict=True):
            if parameter.grad is not None:
                change(parameter, parameter.grad, weights, version)
        if self._rule.name == "feedback":
            self._remember(version, newest)

    def _correct(self, parameter: nn.Parameter, g: Tensor, old: Tensor, version: int) -> None:
        g.add_(g * g * (parameter - old), alpha=self._rule.strength)

    def _look_ahead(self, parameter: nn.Parameter, g: Tensor, old: Tensor, version: int) -> None:
        momentum = self._momenta.setdefault(parameter, torch.zeros_like(g))
        momentum.mul_(self._rule.strength).add_(g)
        g.add_(momentum, alpha=self._rule.strength)

    def _feed_back(self, parameter: nn.Parameter, g: Tensor, old: Tensor, version: int) -> None:
        used = self._applied.get(version, {}).get(parameter)
        if used is not None:
            g.add_(g - used, alpha=self._rule.strength)

    def _remember(self, version: int, newest: int) -> None:
        """What updates `newest`; of versions before `version`, no gradient will come any more."""
        self._applied[newest] = {p: p.grad.clone() for p in self._parameters if p.grad is not None}
        for earlier in [known for known in self._applied if known < version]:
            del self._applied[earlier]
