"""The torch.distributed backend "pipecomm": its options, its registration, how a group gets one.

Knows nothing of pipelines. The extension's torch half is loaded (and built, where it is not
there yet) when the first group is made, not when this module is imported.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipecomm import _c10d_build, rendezvous
from pipecomm.codec import Codec
from pipecomm.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["BackendOptions", "register"]

_NAME = "pipecomm"
_log = logging.getLogger(_NAME)
# Messages below this size gain nothing from a codec: they cost latency, not bandwidth.
_MIN_NBYTES = 65536
_MAX_RANKS_IN_NAME = 8


def _from_env(variable: str, default: str) -> str:
    return os.environ.get(variable) or default


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

    Raises ConfigError for a codec or inner backend that is not known, or a bad number.
    """

    codec: str | Codec = field(default_factory=lambda: _from_env("PIPECOMM_CODEC", "raw"))
    grad_codec: str | Codec = field(default_factory=lambda: _from_env("PIPECOMM_GRAD_CODEC", "raw"))
    min_nbytes: int = field(default_factory=_min_nbytes_from_env)
    inner: str = "gloo"
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.parse(self.codec))
        object.__setattr__(self, "grad_codec", Codec.parse(self.grad_codec))
        if self.min_nbytes < 0:
            raise ConfigError(f"expected min_nbytes >= 0; got {self.min_nbytes}")
        if self.inner not in _INNER_BACKENDS:
            known = ", ".join(sorted(_INNER_BACKENDS))
            raise ConfigError(f"expected an inner backend out of: {known}; got {self.inner!r}")

    @property
    def settings(self) -> str:
        """What both ends of a message must agree on, as text."""
        return f"codec={self.codec} grad_codec={self.grad_codec} min_nbytes={self.min_nbytes}"

    @property
    def _timeout(self) -> timedelta | None:
        # torch's DeviceMesh reads this name from whatever is given as pg_options.
        return self.timeout


def register() -> None:
    """Make "pipecomm" a name init_process_group and new_group know. Can be called again."""
    if dist.is_available() and _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])


def _create(group: Any, options: Any) -> Any:
    """The c10d.Backend of this rank in a new group; called by torch on every member.

    `group` is torch's DistributedBackendOptions, `options` the caller's pg_options.
    """
    options = BackendOptions() if options is None else options
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
    _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    return dist.ProcessGroupGloo(_sub_store(store, "inner"), rank, size, timeout)


def _check_interfaces(names: str) -> None:
    found = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in names.split(",") if name and name not in found]
    if wrong:
        raise ConfigError(
            f"expected network interfaces of this host in GLOO_SOCKET_IFNAME; got {names!r}, "
            f"and {', '.join(wrong)} is not there. Found: {', '.join(found)}"
        )


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
