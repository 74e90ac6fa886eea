"""The norm of a model's gradients over all stages, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Gather", "clip_grad_norm", "local_part"]

# Gives every rank the values of all ranks, in rank order, for one value of its own.
Gather = Callable[[Tensor], Sequence[Tensor]]
# The dimensions of a mesh over which a tensor is cut; no mesh for a whole one.
_Cut = tuple["DeviceMesh | None", tuple[int, ...]]


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    gather: Gather,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> float:
    """Scale the gradients by max_norm / norm where their norm over all stages is larger.

    The norm is (sum |g|^p)^(1/p) for p = `norm_type`, and max |g| for infinity. Each stage's part
    is summed in float64, in rank order, so that every rank gets the same bits. A stage without
    gradients counts 0. A norm that is not finite is returned as it is and nothing is scaled.
    A DTensor counts with all its shards, for which every rank of its mesh has to call this.
    Gradients of `counted_elsewhere` are scaled and leave the norm alone.

    Raises ConfigError for a max_norm below 0 and a norm_type that is not above 0.
    """
    _check(max_norm, norm_type)
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    others = set(counted_elsewhere)
    counted = [p.grad for p in with_grad if p.grad is not None and p not in others]
    parts = [float(part) for part in gather(_part(counted, norm_type))]
    if any(math.isnan(part) for part in parts):
        return math.nan
    total = max(parts) if math.isinf(norm_type) else sum(parts) ** (1.0 / norm_type)
    if math.isfinite(total) and total > max_norm:
        for parameter in with_grad:
            assert parameter.grad is not None
            parameter.grad.mul_(max_norm / total)
    return total


def local_part(tensor: Tensor) -> tuple[Tensor, _Cut]:
    """What this rank holds of a DTensor, and how that was cut; any other tensor as it is."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor, (None, ())
    # Takes most of a second to import, for which nobody without a DTensor should wait.
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor, (None, ())
    if any(placement.is_partial() for placement in tensor.placements):
        whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    cut = (dim for dim, p in enumerate(tensor.placements) if not p.is_replicate())
    return tensor.to_local(), (tensor.device_mesh, tuple(cut))


def _check(max_norm: float, norm_type: float) -> None:
    if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ConfigError(f"expected a max_norm of at least 0; got {max_norm!r}")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ConfigError(f"expected a norm_type above 0, or infinity; got {norm_type!r}")


def _part(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """This stage's maximum, or its sum of powers: a float64 scalar on the CPU."""
    by_cut: dict[_Cut, list[Tensor]] = {}
    for grad in grads:
        local, cut = local_part(grad)
        by_cut.setdefault(cut, []).append(local)
    parts = [_part_of(locals_, norm_type, cut) for cut, locals_ in by_cut.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return _combined(torch.stack([part.cpu() for part in parts]), norm_type)


def _part_of(grads: Sequence[Tensor], norm_type: float, cut: _Cut) -> Tensor:
    """As _part, of tensors cut in one way, on their device: the host waits once for all of it."""
    norms = [_norm(grad, norm_type).to(grads[0].device) for grad in grads]
    powers = torch.stack(norms)
    if not math.isinf(norm_type):
        powers = powers.pow(norm_type)
    part = _combined(powers, norm_type)
    mesh, dims = cut
    for dim in dims:
        assert mesh is not None
        # Not a reduction: every rank gets the same bits, and the maximum with NaN is NaN.
        parts = [torch.empty_like(part) for _ in range(mesh.size(dim))]
        dist.all_gather(parts, part, group=mesh.get_group(dim))
        part = _combined(torch.stack(parts), norm_type)
    return part


def _combined(parts: Tensor, norm_type: float) -> Tensor:
    return parts.max() if math.isinf(norm_type) else parts.sum()


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    """A float64 scalar; 0 for the shard that is left empty by a cut into more than there is."""
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad))
    return norm.double()


def _wide(grad: Tensor) -> torch.dtype | None:
    """float32 for the half formats, in which a sum of squares overflows or rounds away."""
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
