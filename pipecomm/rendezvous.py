"""How the ranks of a process group find each other: addresses by a store, then connections."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from pipecomm._native import core
from pipecomm.errors import ConfigError, LinkTimeoutError, StageFailedError, TransportError

if TYPE_CHECKING:
    from pipecomm.memory import MemoryPool

__all__ = ["Store", "UnreachableError", "announce", "connect"]

_POLL_S = 0.005
_FAILED = "pipecomm/failed"


class UnreachableError(TransportError):
    """Some ranks cannot share memory. Raised on all ranks of the group, or on none."""


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
    emulated_mbps: float = 0.0,
    emulated_latency_ms: float = 0.0,
    pool: MemoryPool | None = None,
) -> Any:
    """Connect this rank to the `size` ranks of a process group; every one of them calls this.

    `name` is shown in errors and must be the same everywhere, as must `settings`. Keys in
    `store` start with "pipecomm/"; give each group a store of its own (PrefixStore).
    Returns a `_core.Communicator`. Raises LinkTimeoutError that names the missing ranks,
    ConfigError when ranks differ in size, version or settings, or for a timeout that is not
    positive, StageFailedError when a rank has announced that it will not come, PeerLostError
    when one dies meanwhile, UnreachableError when some cannot be reached through shared memory.
    """
    if not timeout_s > 0:
        raise ConfigError(f"expected a timeout of more than 0 s; got {timeout_s}")
    deadline = time.monotonic() + timeout_s
    listener = core.Listener()
    addresses = [listener.address]
    if size > 1:
        store.set(f"pipecomm/{rank}", listener.address)
        addresses = _collect(store, rank, size, name, timeout_s, deadline)
        _check_reachable(addresses, rank, name)
    return listener.connect(
        rank,
        addresses,
        name=name,
        settings=settings,
        timeout_s=max(deadline - time.monotonic(), 0.0),
        pool=None if pool is None else pool.core_pool,
        emulated_bytes_per_s=emulated_mbps * 1e6 / 8,
        emulated_latency_s=emulated_latency_ms / 1e3,
    )


def _check_reachable(addresses: list[str], rank: int, name: str) -> None:
    # Being on one host is the same seen from any rank, so that all decide alike.
    for peer, address in enumerate(addresses):
        if why := core.why_unreachable(addresses[0], address):
            raise UnreachableError(
                f"expected rank {peer} to be reachable through shared memory; got, seen from "
                f"rank 0: {why}; where: rank {rank}, process group '{name}'; run all ranks on one "
                f"host, as one user, in one network namespace"
            )


def _collect(
    store: Store, rank: int, size: int, name: str, timeout_s: float, deadline: float
) -> list[str]:
    keys = [f"pipecomm/{peer}" for peer in range(size)]
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
