"""The torch.distributed backend "pipecomm": its options, its registration, how a group gets one.

Knows nothing of pipelines. The extension's torch half is loaded (and built, where it is not
there yet) when the first group is made, not when this module is imported.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipecomm import _c10d_build, env_rendezvous, rendezvous
from pipecomm.codec import Codec
from pipecomm.errors import ConfigError, TransportError
from pipecomm.flow import FlowLimits
from pipecomm.interfaces import check_interfaces

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["BackendOptions", "connect_beside", "register"]

_NAME = "pipecomm"
_log = logging.getLogger(_NAME)
# Messages below this size gain nothing from a codec: they cost latency, not bandwidth.
_MIN_NBYTES = 65536
_MAX_RANKS_IN_NAME = 8


def _from_env(variable: str, default: str) -> str:
    return os.environ.get(variable) or default


def _codec_from_env(variable: str) -> Codec:
    try:
        return Codec.parse(_from_env(variable, "raw"))
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from error


def _min_nbytes_from_env() -> int:
    text = _from_env("PIPECOMM_MIN_NBYTES", str(_MIN_NBYTES))
    if not text.isdecimal():
        raise ConfigError(f"expected a number of bytes in PIPECOMM_MIN_NBYTES; got {text!r}")
    return int(text)


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
        min_nbytes: smaller tensors are never quantized. Default: PIPECOMM_MIN_NBYTES or 65536.
        inner: the backend that runs the collectives; "gloo".
        timeout: overrides the group's timeout for sends, receives and the inner backend.
        limits: what each link takes before its sender waits. Default: from the environment.

    Raises ConfigError for a codec or inner backend that is not known, or a bad number.
    """

    codec: str | Codec = field(default_factory=lambda: _codec_from_env("PIPECOMM_CODEC"))
    grad_codec: str | Codec = field(default_factory=lambda: _codec_from_env("PIPECOMM_GRAD_CODEC"))
    min_nbytes: int = field(default_factory=_min_nbytes_from_env)
    inner: str = "gloo"
    timeout: timedelta | None = None
    limits: FlowLimits = field(default_factory=FlowLimits)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.parse(self.codec))
        object.__setattr__(self, "grad_codec", Codec.parse(self.grad_codec))
        if type(self.min_nbytes) is not int or not 0 <= self.min_nbytes < 1 << 63:
            raise ConfigError(
                f"expected a number of bytes of 0 or more as min_nbytes; got {self.min_nbytes!r}"
            )
        if self.inner not in list(_INNER_BACKENDS):
            known = ", ".join(sorted(_INNER_BACKENDS))
            raise ConfigError(f"expected an inner backend out of: {known}; got {self.inner!r}")
        if self.timeout is not None and not _is_positive(self.timeout):
            raise ConfigError(
                f"expected a timedelta of more than 0 s as timeout; got {self.timeout!r}"
            )
        if not isinstance(self.limits, FlowLimits):
            raise ConfigError(f"expected FlowLimits as limits; got {self.limits!r}")

    @property
    def settings(self) -> str:
        """What both ends of a message must agree on, as text."""
        return f"codec={self.codec} grad_codec={self.grad_codec} min_nbytes={self.min_nbytes}"

    @property
    def _timeout(self) -> timedelta | None:
        # torch's DeviceMesh reads this name from whatever is given as pg_options.
        return self.timeout


def _is_positive(time: object) -> bool:
    return isinstance(time, timedelta) and time > timedelta(0)


def register() -> None:
    """Make "pipecomm" a name init_process_group and new_group know. Can be called again.

    Environment variables are then checked before ranks connect through them, for any backend.
    With PIPECOMM_AUTOLOAD=1 pipecomm also takes gloo's place.
    """
    if not dist.is_available():
        return
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # Imported late: not every torch is built with torch.distributed.
    from pipecomm import autoload

    env_rendezvous.check_first()
    if autoload.is_wanted():
        autoload.take_over_gloo()


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

    # A group may have other backends for other devices, whose options these then are.
    if options is None or isinstance(options, Backend.Options):
        options = BackendOptions()
    if not isinstance(options, BackendOptions):
        raise ConfigError(
            f"expected pg_options of type pipecomm.BackendOptions; got {type(options).__name__}"
        )
    rank, size, timeout = group.group_rank, group.group_size, options.timeout or group.timeout
    # A store that outlives a group keeps its keys; each life of the group has its own.
    life = group.store.add(f"pipecomm/life/{rank}", 1)
    store = _sub_store(group.store, f"pipecomm/{life}")
    make_inner = functools.partial(_INNER_BACKENDS[options.inner], store, rank, size)
    communicator = _connect(store, group, options, timeout)
    if communicator is None:
        # Made now, by all ranks: a send or receive is no occasion that all of them reach.
        inner = make_inner(timeout)
        make_inner = functools.partial(lambda inner, _: inner, inner)
    return _load_c10d().PipecommBackend(
        rank=rank,
        size=size,
        communicator=communicator and communicator.capsule(),
        make_inner=make_inner,
        timeout=timeout,
        codec=str(options.codec),
        grad_codec=str(options.grad_codec),
        min_nbytes=options.min_nbytes,
    )


def _connect(store: Store, group: Any, options: BackendOptions, timeout: timedelta) -> Any:
    """This rank's _core.Communicator; None, on all ranks, if some cannot be reached."""
    try:
        return rendezvous.connect(
            store,
            group.group_rank,
            group.group_size,
            name=_describe(group),
            timeout_s=timeout.total_seconds(),
            settings=options.settings,
            limits=options.limits,
        )
    except rendezvous.UnreachableError as error:
        if group.group_rank == 0:
            _log.warning("sends and receives go through %s, uncompressed: %s", options.inner, error)
        return None


def _sub_store(store: Store, prefix: str) -> Store:
    # Imported late: not every torch is built with torch.distributed.
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def _make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    check_interfaces("GLOO_SOCKET_IFNAME")
    try:
        return dist.ProcessGroupGloo(_sub_store(store, "inner"), rank, size, timeout)
    except RuntimeError as error:
        raise TransportError(
            f"expected all {size} ranks at the group's first collective within its timeout of "
            f"{timeout.total_seconds():g} s; got, from gloo: {error}; where: rank {rank}; "
            "check that all of them call it, or raise the timeout"
        ) from error


_INNER_BACKENDS = {"gloo": _make_gloo}


@functools.cache
def _load_c10d() -> ModuleType:
    module = _c10d_build.load(torch)
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
