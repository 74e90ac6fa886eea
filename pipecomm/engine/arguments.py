"""What a Pipeline is given: refused where it means nothing, and in words for the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from pipecomm.codecs.policy import CodecPolicy, Codecs
from pipecomm.direction import Direction
from pipecomm.engine.data_parallel import check_wrappers
from pipecomm.engine.loss import Reduction
from pipecomm.engine.updates import Updates
from pipecomm.errors import ConfigError
from pipecomm.schedule import Schedule

__all__ = ["check_arguments", "chunks_of", "policies_of", "settings_text"]


def chunks_of(stage: Any) -> list[nn.Module]:
    """The modules of this rank's stages."""
    chunks = [stage] if isinstance(stage, nn.Module) else stage
    if not isinstance(chunks, (list, tuple)) or not chunks:
        raise ConfigError(
            f"expected an nn.Module as stage, or a list of them; got {type(stage).__name__}"
        )
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise ConfigError(f"expected an nn.Module as stage; got {type(chunk).__name__}")
        check_wrappers(chunk)
    return list(chunks)


def check_arguments(loss_fn: Any, loss_reduction: Any, timeout_s: Any) -> None:
    """Raise ConfigError for what is wrong whatever the stages are."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"expected a function as loss_fn; got {loss_fn!r}")
    if loss_reduction not in get_args(Reduction):
        raise ConfigError(f'expected loss_reduction "mean" or "sum"; got {loss_reduction!r}')
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ConfigError(f"expected timeout_s of more than 0 s; got {timeout_s!r}")


def settings_text(
    schedule: Schedule,
    policies: Mapping[Direction, CodecPolicy],
    updates: Updates | None,
    *,
    is_chosen: bool = False,
) -> str:
    """What all ranks must agree on, in words. `is_chosen`: `schedule` is only the first one."""
    name = f"auto, at first {schedule.name}," if is_chosen else schedule.name
    text = (
        f"schedule {name} of {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, "
        f"codecs {policies['forward']} and {policies['backward']}"
    )
    return text if updates is None else f"{text}, {updates}"


def policies_of(
    codec: Codecs, grad_codec: Codecs, num_boundaries: int
) -> dict[Direction, CodecPolicy]:
    """Of activations and of their gradients."""
    policies: dict[Direction, CodecPolicy] = {
        "forward": CodecPolicy.parse(codec),
        "backward": CodecPolicy.parse(grad_codec),
    }
    for policy in policies.values():
        policy.check(num_boundaries)
    return policies
