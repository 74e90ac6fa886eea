"""Finds this rank's place in a pipeline and connects it to the other stages."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipecomm.codec import Codec
from pipecomm.errors import ConfigError, LinkTimeoutError
from pipecomm.link import LinkEmulation, Links, announce
from pipecomm.link_speed import boundary_speeds
from pipecomm.policy import AUTO, BoundaryCodec, CodecPolicy, codec_for_speed
from pipecomm.stats import Direction

if TYPE_CHECKING:
    from pipecomm.flow import FlowLimits
    from pipecomm.memory import MemoryPool
    from pipecomm.rendezvous import Store

__all__ = ["announce_failure", "choose_codecs", "connect_stages", "find_place"]

_POLL_S = 0.002
_log = logging.getLogger("pipecomm")

# Per process group, to give each pipeline its own part of the group's store.
_num_connected: Counter[str] = Counter()


def find_place(process_group: dist.ProcessGroup | None, num_stages: int | None) -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) where torch.distributed is not initialised.

    Raises ConfigError if that is not one rank for each of `num_stages`.
    """
    is_initialized = dist.is_available() and dist.is_initialized()
    rank, size = 0, 1
    if is_initialized:
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ConfigError("expected a process group with this rank in it; got one without")
    if num_stages is not None and num_stages != size:
        why = "" if is_initialized else " (torch.distributed is not initialised)"
        raise ConfigError(
            f"expected one rank for each of {num_stages} stages; got {size} in all{why}. "
            f"Start {num_stages} ranks and call torch.distributed.init_process_group"
        )
    return rank, size


def connect_stages(
    process_group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    *,
    settings: str,
    timeout_s: float,
    emulation: LinkEmulation | None,
    pool: MemoryPool | None,
    limits: FlowLimits | None = None,
    device: torch.device,
) -> Links:
    """Links to the other ranks, returned when every rank has its own.

    Raises ConfigError on every rank unless all give the same `settings`.
    """
    store = _store(process_group)
    links = Links.connect(
        store,
        rank,
        size,
        timeout_s=timeout_s,
        emulation=emulation,
        pool=pool,
        limits=limits,
    )
    try:
        # Before another rank can send to it.
        links.use_device(device)
        store.set(f"settings/{rank}", settings)
        _wait_for_all(store, links, [f"settings/{other}" for other in range(size)], timeout_s)
        _compare(store, rank, size, settings)
    except BaseException:
        links.close()
        raise
    return links


def choose_codecs(
    links: Links,
    policies: Mapping[Direction, CodecPolicy],
    device: torch.device,
    emulation: LinkEmulation | None = None,
) -> dict[Direction, BoundaryCodec]:
    """What this rank uses for what it sends: "forward" except on the last, "backward" on the first.

    All ranks call this together in a step. "auto" is decided by the speed of the boundary's slower
    direction, measured with tensors on `device` where it is not known: all ranks decide alike, for
    all boundaries, and log what to write to have the same again.
    """
    num_boundaries = links.size - 1
    speeds = [math.inf] * num_boundaries
    if any(AUTO in policy.names for policy in policies.values()):
        speeds = boundary_speeds(links, device, emulation)
    chosen: dict[Direction, BoundaryCodec] = {}
    own: dict[Direction, int] = {"forward": links.rank, "backward": links.rank - 1}
    for direction, boundary in own.items():
        policy = policies[direction]
        codecs = [_decide(policy.at(k, num_boundaries), speed) for k, speed in enumerate(speeds)]
        if AUTO in policy.names:
            _tell(direction, codecs, speeds)
        if 0 <= boundary < num_boundaries:
            where = f"stage {links.rank}, {direction}"
            chosen[direction] = BoundaryCodec(policy, codecs[boundary], where)
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
    process_group: dist.ProcessGroup | None, rank: int, size: int, error: Exception
) -> None:
    """Tell the ranks that connect, or will, that this one does not: they raise StageFailedError."""
    if size > 1:
        text = f"rank {rank} cannot make its pipeline: {type(error).__name__}: {error}"
        announce(_store(process_group), text)


def _store(process_group: dist.ProcessGroup | None) -> Store:
    """A part of the process group's store for one more pipeline, the same on every rank."""
    group = process_group or dist.distributed_c10d._get_default_group()
    name = group.group_name
    _num_connected[name] += 1
    prefix = f"pipecomm/pipeline/{name}/{_num_connected[name]}"
    return dist.PrefixStore(  # type: ignore[attr-defined]
        prefix, dist.distributed_c10d._get_default_store()
    )


def _wait_for_all(store: Store, links: Links, keys: list[str], timeout_s: float) -> None:
    """Return when all keys are set. A rank that fails early must not disturb others connecting."""
    deadline = time.monotonic() + timeout_s
    # Nothing is sent before the first step, so this ends only when a rank is lost.
    probe = links.receive((links.rank + 1) % links.size, direction="forward", microbatch=0)
    while not store.check(keys):
        if probe.is_done and not store.check(keys):
            probe.wait()
        if time.monotonic() > deadline:
            raise LinkTimeoutError(
                f"expected every rank to connect within {timeout_s:g} s; rank {links.rank} still "
                f"waits for others; look at their output"
            )
        time.sleep(_POLL_S)


def _compare(store: Store, rank: int, size: int, settings: str) -> None:
    for other in range(size):
        theirs = store.get(f"settings/{other}").decode()
        if theirs != settings:
            raise ConfigError(
                f"expected the same settings on every rank; got {settings} on rank {rank} and "
                f"{theirs} on rank {other}"
            )
