"""Connects a rank to the others of its pipeline; together they choose each boundary's codec."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.codecs.policy import AUTO, BoundaryCodec, CodecPolicy, codec_for_speed
from pipecomm.direction import Direction
from pipecomm.engine.link_speed import boundary_speeds
from pipecomm.errors import ConfigError
from pipecomm.links.link import LinkEmulation, Links, announce
from pipecomm.schedule import Hop, Placement

if TYPE_CHECKING:
    from pipecomm.links.limits import FlowLimits
    from pipecomm.links.rendezvous import Store
    from pipecomm.memory.pool import MemoryPool

__all__ = [
    "announce_failure",
    "check_num_stages",
    "choose_codecs",
    "codecs_by_direction",
    "connect_stages",
    "rank_and_size",
]

_log = logging.getLogger("pipecomm")


def rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) where torch.distributed is not initialised."""
    rank, size = 0, 1
    if _is_initialized():
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ConfigError("expected a process group with this rank in it; got one without")
    return rank, size


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def check_num_stages(expected: int | None, num_stages: int, size: int) -> None:
    """Raise ConfigError unless the pipeline, over `size` ranks, has as many stages as expected."""
    if expected is None or expected == num_stages:
        return
    why = "" if _is_initialized() else " (torch.distributed is not initialised)"
    if num_stages != size:
        raise ConfigError(
            f"expected {expected} stages; got {num_stages} on {size} ranks{why}. Every rank gives "
            f"a module for each of its stages"
        )
    raise ConfigError(
        f"expected one rank for each of {expected} stages; got {size} in all{why}. "
        f"Start {expected} ranks and call torch.distributed.init_process_group"
    )


def connect_stages(
    process_group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    settings: str,
    timeout_s: float,
    emulation: LinkEmulation | None,
    pool: MemoryPool | None,
    limits: FlowLimits | None,
    device: torch.device,
) -> Links | None:
    """Links to the other ranks, returned when every rank has its own; None for a rank alone.

    Raises as rendezvous.connect does: ConfigError unless all give the same `settings`.
    """
    if size == 1:
        return None
    return Links.connect(
        _store(process_group),
        rank,
        size,
        settings=settings,
        timeout_s=timeout_s,
        emulation=emulation,
        pool=pool,
        limits=limits,
        device=device,
    )


def choose_codecs(
    links: Links,
    placement: Placement,
    policies: Mapping[Direction, CodecPolicy],
    device: torch.device,
    emulation: LinkEmulation | None = None,
) -> dict[Hop, BoundaryCodec]:
    """What this rank uses for what it sends, by its way; inside a rank nothing is encoded.

    All ranks call this together in a step. "auto" is decided by the speed of the boundary's slower
    direction, measured with tensors on `device` where it is not known: all ranks decide alike, for
    all boundaries, and log what to write to have the same again.
    """
    num_boundaries = placement.num_boundaries
    speeds = [math.inf] * num_boundaries
    if any(AUTO in policy.names for policy in policies.values()):
        speeds = boundary_speeds(links, placement, device, emulation)
    chosen: dict[Hop, BoundaryCodec] = {}
    for direction, policy in policies.items():
        codecs = [_decide(policy.at(k, num_boundaries), speed) for k, speed in enumerate(speeds)]
        if AUTO in policy.names:
            _tell(direction, codecs, speeds)
        for boundary, codec in enumerate(codecs):
            hop = placement.hop_over(boundary, direction)
            if hop.is_message and hop.sender == links.rank:
                where = f"stage {hop.source}, {direction}"
                chosen[hop] = BoundaryCodec(policy, codec, where)
    return chosen


def _decide(name: str, speed: float) -> Codec:
    return codec_for_speed(speed) if name == AUTO else Codec(name)


def _tell(direction: Direction, codecs: list[Codec], speeds: list[float]) -> None:
    name = {"forward": "codec", "backward": "grad_codec"}[direction]
    links = ["memory of one host" if math.isinf(x) else f"{x / 1e6:.3g} MB/s" for x in speeds]
    _log.info(
        '%s="auto" decided by the links (%s); the same again: %s=%s',
        name, ", ".join(links), name, [str(codec) for codec in codecs],
    )  # fmt: skip


def announce_failure(
    process_group: dist.ProcessGroup | None, rank: int, size: int, error: BaseException
) -> None:
    """Tell the ranks that connect, or will, that this one does not: they raise StageFailedError."""
    if size > 1:
        text = f"rank {rank} cannot make its pipeline: {type(error).__name__}: {error}"
        announce(_store(process_group), rank, text)


def _store(process_group: dist.ProcessGroup | None) -> Store:
    """The process group's part of the default store, where its pipelines meet."""
    name = (process_group or dist.distributed_c10d._get_default_group()).group_name
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"pipecomm/pipeline/{name}", dist.distributed_c10d._get_default_store()
    )


def codecs_by_direction(codecs: Mapping[Hop, BoundaryCodec]) -> dict[str, str]:
    """The names of those in use, in the order of the boundaries: "int4, raw"."""
    names: dict[str, list[str]] = {}
    for hop, boundary in codecs.items():
        names.setdefault(hop.direction, []).append(str(boundary.codec))
    return {direction: ", ".join(of_direction) for direction, of_direction in names.items()}
