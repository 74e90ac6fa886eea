"""The torch.distributed backend "pipecomm": its options, its registration, how a group gets one.

Knows nothing of pipelines. The extension's torch half is loaded (and built, where it is not
there yet) when the first group is made, not when this module is imported.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipecomm import settings
from pipecomm.codecs.codec import Codec
from pipecomm.drop_in import env as env_rendezvous
from pipecomm.errors import ConfigError, TransportError
from pipecomm.links import rendezvous
from pipecomm.links.generation import Seat
from pipecomm.links.interfaces import check_interfaces
from pipecomm.links.limits import FlowLimits
from pipecomm.torch_half import c10d_build

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["BackendOptions", "connect_beside", "register"]

_NAME = "pipecomm"
_GLOO, _NCCL = "gloo", "nccl"
_DEFAULT_INNER = f"cpu:{_GLOO},cuda:{_NCCL}"
_log = logging.getLogger(_NAME)
_MAX_RANKS_IN_NAME = 8


def _codec_of(setting: settings.Setting[str]) -> Codec:
    try:
        return Codec.parse(setting.value())
    except ConfigError as error:
        raise ConfigError(f"{setting.name}: {error}") from error


@dataclass(frozen=True)
class BackendOptions:
    """What `pg_options` of init_process_group and new_group may say. Equal on all ranks.

    Without codecs every message arrives bit for bit. With one, tensors of float32, float16 and
    bfloat16 of at least `min_nbytes` bytes are quantized on their way, and sender and receiver
    must then give them the same shape. Everything else stays bit for bit.

    Attributes:
        codec: for messages to higher ranks (activations). Default: PIPECOMM_CODEC or "raw".
        grad_codec: for messages to lower ranks (activation gradients).
            Default: PIPECOMM_GRAD_CODEC or "raw".
        min_nbytes: smaller tensors are never quantized. Default: PIPECOMM_MIN_NBYTES or 4096.
        inner: the backends that run the collectives: "gloo" or "nccl" for all tensors, or one
            for each device, as "cpu:gloo,cuda:nccl". That is the default where torch has NCCL,
            "gloo" elsewhere. Calls without tensors (barrier) are those of the "cpu" one's.
        timeout: overrides the group's timeout for sends, receives and the inner backend.
        limits: what each link takes before its sender waits. Default: from the environment.

    Raises ConfigError for a codec or inner backend that is not known, for "nccl" where torch has
    none, or a bad number.
    """

    codec: str | Codec = field(default_factory=lambda: _codec_of(settings.CODEC))
    grad_codec: str | Codec = field(default_factory=lambda: _codec_of(settings.GRAD_CODEC))
    min_nbytes: int = field(default_factory=settings.MIN_NBYTES.value)
    inner: str = field(default_factory=lambda: _DEFAULT_INNER if _has_nccl() else _GLOO)
    timeout: timedelta | None = None
    limits: FlowLimits = field(default_factory=FlowLimits)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.parse(self.codec))
        object.__setattr__(self, "grad_codec", Codec.parse(self.grad_codec))
        if type(self.min_nbytes) is not int or not 0 <= self.min_nbytes < 1 << 63:
            raise ConfigError(
                f"expected a number of bytes of 0 or more as min_nbytes; got {self.min_nbytes!r}"
            )
        _parse_inner(self.inner)
        if self.timeout is not None and not _is_positive(self.timeout):
            raise ConfigError(
                f"expected a timedelta of more than 0 s as timeout; got {self.timeout!r}"
            )
        if not isinstance(self.limits, FlowLimits):
            raise ConfigError(f"expected FlowLimits as limits; got {self.limits!r}")

    @property
    def settings(self) -> str:
        """What both ends of a message must agree on, as text."""
        return (
            f"codec={self.codec} grad_codec={self.grad_codec} min_nbytes={self.min_nbytes} "
            f"inner={self.inner}"
        )

    @property
    def _timeout(self) -> timedelta | None:
        # torch's DeviceMesh reads this name from whatever is given as pg_options.
        return self.timeout


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _parse_inner(inner: object) -> dict[str, str]:
    """Names of the inner backends by device type, "cpu" among them."""
    text = inner if isinstance(inner, str) else ""
    names = {"cpu": text, "cuda": text}
    if ":" in text:
        items = [item.strip().partition(":") for item in text.split(",")]
        names = {"cpu": _GLOO, **{device: name for device, _, name in items}}
    if not set(names.values()) <= set(_INNER_BACKENDS):
        known = ", ".join(sorted(_INNER_BACKENDS))
        raise ConfigError(
            f"expected as inner one out of: {known}, or one for each device, as "
            f"{_DEFAULT_INNER}; got {inner!r}"
        )
    if _NCCL in names.values() and not _has_nccl():
        raise ConfigError(
            f"expected a torch with NCCL for the inner backend nccl; got torch {torch.__version__} "
            "without; name gloo, or install a torch for CUDA"
        )
    return names


def _is_positive(time: object) -> bool:
    return isinstance(time, timedelta) and time > timedelta(0)


def register() -> None:
    """Make "pipecomm" a name that init_process_group and new_group know. Can be called again.

    Environment variables are then checked before its ranks connect through them. With
    PIPECOMM_AUTOLOAD=1 pipecomm also takes gloo's place.
    """
    if not dist.is_available():
        return
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # Imported late: not every torch is built with torch.distributed.
    from pipecomm.drop_in import autoload

    env_rendezvous.check_first(_is_for_us)
    if autoload.is_wanted():
        autoload.take_over_gloo()


def _is_for_us(backend: str) -> bool:
    """Whether a name, or names by device as "cpu:gloo,cuda:pipecomm", has ours in it."""
    return _NAME in backend.replace(":", ",").split(",")


def connect_beside(group: dist.ProcessGroup, options: BackendOptions | None = None) -> Any:
    """A c10d.Backend on the ranks of a group of any backend, known to the caller alone.

    All ranks of the group call it, and no others have to (new_group would involve them). Ranks
    are ranks in the group. It closes when it is dropped; its timeout is that of the options, or
    torch's default. Raises as init_process_group("pipecomm") does.
    """
    from torch._C._distributed_c10d import _DistributedBackendOptions

    made = _DistributedBackendOptions()
    made.store = _sub_store(dist.distributed_c10d._get_process_group_store(group), "beside")
    made.group_rank, made.group_size = group.rank(), group.size()
    made.timeout = dist.constants.default_pg_timeout
    made.group_id = group.group_name
    made.global_ranks_in_group = dist.get_process_group_ranks(group)
    return _create(made, options)


def _create(group: Any, options: Any) -> Any:
    """The c10d.Backend of this rank in a new group; called by torch on every member.

    `group` is torch's DistributedBackendOptions, `options` the caller's pg_options.
    """
    from torch._C._distributed_c10d import Backend

    seat = Seat(group.store, group.group_rank)
    with rendezvous.told_to_all(seat):
        # A group may have other backends for other devices, whose options these then are.
        if options is None or isinstance(options, Backend.Options):
            options = BackendOptions()
        if not isinstance(options, BackendOptions):
            raise ConfigError(
                f"expected pg_options of type pipecomm.BackendOptions; got {type(options).__name__}"
            )
        make_backend = _load_c10d().PipecommBackend
        communicator = _connect(seat, group, options)
    rank, size, timeout = group.group_rank, group.group_size, options.timeout or group.timeout
    # A store that outlives a group keeps its keys; each life of the group has its own.
    store = _sub_store(group.store, f"pipecomm/{seat.generation}")
    members = _Members(store, rank, size, group.group_id, list(group.global_ranks_in_group))
    inner_names = _parse_inner(options.inner)
    made = {}
    if communicator is None and _GLOO in inner_names.values():
        # Made now, by all ranks: not all of them reach every send or receive. NCCL
        # needs none: it connects two ranks when these send and receive.
        made[_GLOO] = _INNER_BACKENDS[_GLOO](members, timeout)
    return make_backend(
        rank=rank,
        size=size,
        communicator=communicator and communicator.capsule(),
        inner_names=inner_names,
        make_inner=functools.partial(_make_inner, members, made),
        timeout=timeout,
        codec=str(options.codec),
        grad_codec=str(options.grad_codec),
        min_nbytes=options.min_nbytes,
    )


def _connect(seat: Seat, group: Any, options: BackendOptions) -> Any:
    """This rank's _core.Communicator; None, on all ranks, if some cannot be reached."""
    try:
        return rendezvous.connect(
            group.store,
            group.group_rank,
            group.group_size,
            name=_describe(group),
            timeout_s=(options.timeout or group.timeout).total_seconds(),
            settings=options.settings,
            limits=options.limits,
            seat=seat,
        )
    except rendezvous.UnreachableError as error:
        if group.group_rank == 0:
            _log.warning("sends and receives go through %s, uncompressed: %s", options.inner, error)
        return None


def _sub_store(store: Store, prefix: str) -> Store:
    # Imported late: not every torch is built with torch.distributed.
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


@dataclass(frozen=True)
class _Members:
    """This rank's place in a group."""

    store: Store
    rank: int
    size: int
    group_id: Any  # to torch a str of its own kind
    global_ranks: list[int]


def _make_inner(members: _Members, made: dict[str, Any], name: str, timeout: timedelta) -> Any:
    """The inner backend of that name: one of those made already, or a new one."""
    return made.pop(name, None) or _INNER_BACKENDS[name](members, timeout)


def _make_gloo(members: _Members, timeout: timedelta) -> Any:
    check_interfaces(settings.GLOO_SOCKET_IFNAME)
    rank, size = members.rank, members.size
    try:
        return dist.ProcessGroupGloo(_sub_store(members.store, "inner"), rank, size, timeout)
    except RuntimeError as error:
        raise TransportError(
            f"expected all {size} ranks at the group's first collective within its timeout of "
            f"{timeout.total_seconds():g} s; got, from gloo: {error}; where: rank {rank}; "
            "check that all of them call it, or raise the timeout"
        ) from error


def _make_nccl(members: _Members, timeout: timedelta) -> Any:
    """As torch makes one for a group with default options. Not yet run on a GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = members.global_ranks
    options.group_name = members.group_id
    store = _sub_store(members.store, "inner_nccl")
    try:
        return dist.ProcessGroupNCCL(store, members.rank, members.size, options)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"expected NCCL to start for a group's first collective of CUDA tensors; got: {error}; "
            f"where: rank {members.rank}; name gloo as its inner backend where there is no GPU"
        ) from error


_INNER_BACKENDS: dict[str, Callable[[_Members, timedelta], Any]] = {
    _GLOO: _make_gloo,
    _NCCL: _make_nccl,
}


@functools.cache
def _load_c10d() -> ModuleType:
    module = c10d_build.load(torch)
    atexit.register(module.close_all)
    return module


def _describe(group: Any) -> str:
    """The group in the words of an error: its number and members (errors count ranks inside it)."""
    members = list(group.global_ranks_in_group)
    if not members:
        return "the default process group"
    shown = ", ".join(map(str, members[:_MAX_RANKS_IN_NAME]))
    more = ", ..." if len(members) > _MAX_RANKS_IN_NAME else ""
    return f"process group {group.group_id} (global ranks {shown}{more})"
