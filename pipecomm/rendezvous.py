"""How the ranks of a process group find each other: addresses by a store, then connections."""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from pipecomm._native import core
from pipecomm.errors import ConfigError, LinkTimeoutError, StageFailedError, TransportError
from pipecomm.flow import FlowLimits
from pipecomm.interfaces import choose_address
from pipecomm.rank import report_uncaught

if TYPE_CHECKING:
    from pipecomm.memory import MemoryPool

__all__ = ["Store", "UnreachableError", "announce", "connect"]

_POLL_S = 0.005
_FAILED = "pipecomm/failed"
# With "1" tensors of the host cross as those of a GPU do, in slots, by streams that are threads:
# what runs the device's side of the transport on a machine without one. These streams lag behind
# by the second variable's microseconds, so that what does not wait for them shows.
_STAND_IN = "PIPECOMM_STAND_IN_DEVICE"
_STAND_IN_LAG = "PIPECOMM_STAND_IN_LAG_US"


class UnreachableError(TransportError):
    """Some ranks may not connect. Raised on all ranks of the group, or on none."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def announce(store: Store, text: str) -> None:
    """Tell those who connect through `store` that this rank will not; they raise `text`."""
    store.set(_FAILED, text)


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str,
    timeout_s: float,
    settings: str = "",
    limits: FlowLimits | None = None,
    emulated_mbps: float = 0.0,
    emulated_latency_ms: float = 0.0,
    pool: MemoryPool | None = None,
) -> Any:
    """Connect this rank to the `size` ranks of a process group; every one of them calls this.

    `name` is shown in errors and must be the same everywhere, as must `settings` and `limits`
    (default: those of the environment, see FlowLimits). Keys in `store` start with "pipecomm/";
    give each group a store of its own (PrefixStore).
    Returns a `_core.Communicator`. Raises LinkTimeoutError that names the missing ranks,
    ConfigError when ranks differ in size, version, settings or limits, or for a timeout that is not
    positive, StageFailedError when a rank has announced that it will not come, PeerLostError
    when one dies meanwhile, UnreachableError when some run as another user on the same host.

    Ranks on other hosts, or in other network namespaces, are reached through TCP: then every rank
    listens at an address chosen as interfaces.choose_address says until all are connected.
    """
    if not timeout_s > 0:
        raise ConfigError(f"expected a timeout of more than 0 s; got {timeout_s}")
    report_uncaught()
    limits = limits or FlowLimits()
    deadline = time.monotonic() + timeout_s
    listener = core.Listener()
    addresses = [listener.address]
    if size > 1:
        collect = functools.partial(_collect, store, rank, size, name, timeout_s, deadline)
        addresses = collect("pipecomm", listener.address)
        _check_reachable(addresses, rank, name)
        # That two ranks are remote is the same seen from any rank, so that all decide alike.
        if any(core.is_remote(addresses[0], address) for address in addresses):
            _listen_tcp(store, rank, listener, addresses)
            addresses = collect("pipecomm/tcp", listener.address)
    return listener.connect(
        rank,
        addresses,
        name=name,
        settings=f"{settings} {limits.settings}".lstrip(),
        max_inflight=limits.max_inflight,
        max_inflight_nbytes=limits.max_inflight_nbytes,
        max_process_inflight=limits.max_process_inflight,
        max_process_inflight_nbytes=limits.max_process_inflight_nbytes,
        strict=limits.strict,
        timeout_s=max(deadline - time.monotonic(), 0.0),
        pool=None if pool is None else pool.core_pool,
        emulated_bytes_per_s=emulated_mbps * 1e6 / 8,
        emulated_latency_s=emulated_latency_ms / 1e3,
        stand_in_lag_us=_stand_in_lag_us(),
    )


def _stand_in_lag_us() -> int | None:
    is_on = os.environ.get(_STAND_IN) == "1"
    return int(os.environ.get(_STAND_IN_LAG, "0")) if is_on else None


def _check_reachable(addresses: list[str], rank: int, name: str) -> None:
    # Seen from the first rank of each host, so that all decide alike.
    first_there: dict[str, int] = {}
    for peer, address in enumerate(addresses):
        first = first_there.setdefault(address.partition("|")[0], peer)
        if why := core.why_unreachable(addresses[first], address):
            raise UnreachableError(
                f"expected rank {peer} to be reachable; got, seen from rank {first}: {why}; "
                f"where: rank {rank}, process group '{name}'; run all ranks of one host as one user"
            )


def _listen_tcp(store: Store, rank: int, listener: Any, addresses: list[str]) -> None:
    """Choose an interface and listen there. A rank that cannot tells the others."""
    stacks = {_network_stack(address) for address in addresses}
    try:
        _finish_at_exit()
        listener.listen_tcp(choose_address(allow_loopback=len(stacks) == 1))
    except Exception as error:
        announce(store, f"rank {rank} cannot be called from other hosts: {error}")
        raise


@functools.cache
def _finish_at_exit() -> None:
    # Children of multiprocessing end by os._exit, which runs none of C's or Python's exit handlers.
    multiprocessing.util.Finalize(None, core.finish_bridges, exitpriority=0)


def _network_stack(address: str) -> tuple[str, str]:
    boot_id, namespace, *_ = address.split("|")
    return boot_id, namespace.rpartition("@")[2]  # without what sets it apart on purpose


def _collect(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    deadline: float,
    prefix: str,
    own: str,
) -> list[str]:
    """Publish this rank's text and give those of all, by rank."""
    store.set(f"{prefix}/{rank}", own)
    keys = [f"{prefix}/{peer}" for peer in range(size)]
    while not store.check(keys):
        if store.check([_FAILED]):
            raise StageFailedError(store.get(_FAILED).decode())
        missing = ""
        if time.monotonic() > deadline:
            missing = ", ".join(str(peer) for peer in range(size) if not store.check([keys[peer]]))
        if missing:
            raise LinkTimeoutError(
                f"expected all {size} ranks to start within {timeout_s:g} s; got nothing from "
                f"rank {missing}; where: rank {rank}, process group '{name}'; check that it "
                f"runs and uses the same store, or raise the timeout"
            )
        time.sleep(_POLL_S)
    return [store.get(key).decode() for key in keys]
