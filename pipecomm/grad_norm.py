"""The norm of a model's gradients over all stages, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pipecomm.errors import ConfigError

__all__ = ["Gather", "clip_grad_norm"]

# Gives every rank the values of all ranks, in rank order, for one value of its own.
Gather = Callable[[Tensor], Sequence[Tensor]]


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float, gather: Gather
) -> float:
    """Scale the gradients by max_norm / norm where their norm over all stages is larger.

    The norm is (sum |g|^p)^(1/p) for p = `norm_type`, and max |g| for infinity. Each stage's part
    is summed in float64, in rank order, so that every rank gets the same bits. A stage without
    gradients counts 0. A norm that is not finite is returned as it is and nothing is scaled.

    Raises ConfigError for a max_norm below 0 and a norm_type that is not above 0.
    """
    _check(max_norm, norm_type)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [float(part) for part in gather(_part(grads, norm_type))]
    if any(math.isnan(part) for part in parts):
        return math.nan
    total = max(parts) if math.isinf(norm_type) else sum(parts) ** (1.0 / norm_type)
    if math.isfinite(total) and total > max_norm:
        for grad in grads:
            grad.mul_(max_norm / total)
    return total


def _check(max_norm: float, norm_type: float) -> None:
    if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ConfigError(f"expected a max_norm of at least 0; got {max_norm!r}")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ConfigError(f"expected a norm_type above 0, or infinity; got {norm_type!r}")


def _part(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """This stage's maximum, or its sum of powers: a float64 scalar on the CPU."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_wide(g)).double() for g in grads]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    # All together, so that the host waits once for a device.
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms]).cpu()
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _wide(grad: Tensor) -> torch.dtype | None:
    """float32 for the half formats, in which a sum of squares overflows or rounds away."""
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
