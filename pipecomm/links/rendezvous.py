"""How the ranks of a process group find each other: addresses by a store, then connections.

What is raised on one rank, in `make` too, ends it on all of them, and leaves nothing open:
LinkTimeoutError that names the missing ranks, ConfigError when ranks differ in size, version,
settings or limits, or for a timeout that is not positive, StageFailedError with the text of a rank
that failed, PeerLostError when one dies meanwhile, UnreachableError when some run as another user
on the same host.

Keys in a store start with "pipecomm/"; give each group a store of its own (PrefixStore). Ranks may
connect through one store any number of times, one after the other, and start again in between
(generation.py).

Ranks on other hosts, or in other network namespaces, are reached through TCP: then every rank
listens at an address chosen as interfaces.choose_address says until all are connected.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipecomm import settings
from pipecomm._native import core
from pipecomm.errors import (
    ConfigError,
    LinkTimeoutError,
    PeerLostError,
    PipecommError,
    StageFailedError,
    TransportError,
)
from pipecomm.links.agreement import check_settings
from pipecomm.links.generation import NewGenerationError, Seat, Store
from pipecomm.links.interfaces import choose_address
from pipecomm.links.limits import FlowLimits
from pipecomm.outcome import report_uncaught

if TYPE_CHECKING:
    from pipecomm.memory.pool import MemoryPool

__all__ = ["Store", "UnreachableError", "announce", "connect", "told_to_all"]

_POLL_S = 0.005
# A rank that has come answers in far less; one that does not has ended, perhaps in an earlier
# attempt of the job, and its successor is waited for.
_ANSWER_S = 5.0
# What a rank that closes its connections needs to say why.
_REASON_S = 1.0


class UnreachableError(TransportError):
    """Some ranks may not connect. Raised on all ranks of the group, or on none."""


# What every rank finds out by itself, what it has been told, and what says nothing of this rank.
_NOT_TOLD = (UnreachableError, StageFailedError, LinkTimeoutError, NewGenerationError)


def announce(store: Store, rank: int, text: str) -> None:
    """Tell those who connect through `store`, or will, that this rank does not.

    They raise StageFailedError with that text.
    """
    Seat(store, rank).announce(text)


@contextlib.contextmanager
def told_to_all(seat: Seat) -> Iterator[None]:
    """What is raised inside is raised, as StageFailedError, by those who connect with this rank."""
    try:
        yield
    except _NOT_TOLD:
        raise
    except BaseException as error:
        seat.announce(f"rank {seat.rank} cannot connect: {type(error).__name__}: {error}")
        raise


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
    make: Callable[[core.Communicator], Any] = lambda communicator: communicator,
    seat: Seat | None = None,
) -> Any:
    """Connect this rank to the `size` ranks of a process group; every one of them calls this.

    `name` is shown in errors and must be the same everywhere, as must `settings` and `limits`
    (default: those of the environment, see FlowLimits). `seat` is that of a caller who has taken
    it before. Returns what `make` makes of a `_core.Communicator`, before any other rank uses the
    connection. Errors are those at the top of this file.
    """
    report_uncaught()
    deadline = time.monotonic() + timeout_s
    seat = seat or Seat(store, rank)
    with told_to_all(seat):
        if not timeout_s > 0:
            raise ConfigError(f"expected a timeout of more than 0 s; got {timeout_s}")
        limits = limits or FlowLimits()
        agreed = f"{settings} {limits.settings}".lstrip()
        group = _Group(seat, size, name, timeout_s, deadline, agreed)
        options = _core_options(limits, pool, emulated_mbps, emulated_latency_ms)
        return _connect_in_newest(group, options, make)


def _core_options(
    limits: FlowLimits, pool: MemoryPool | None, mbps: float, latency_ms: float
) -> dict[str, Any]:
    is_stand_in = settings.STAND_IN_DEVICE.value()
    return {
        **asdict(limits),
        "pool": None if pool is None else pool.core_pool,
        "emulated_bytes_per_s": mbps * 1e6 / 8,
        "emulated_latency_s": latency_ms / 1e3,
        "stand_in_lag_us": settings.STAND_IN_LAG_US.value() if is_stand_in else None,
    }


@dataclass(frozen=True)
class _Group:
    """Those who connect, as seen from this rank, and by when."""

    seat: Seat
    size: int
    name: str
    timeout_s: float
    deadline: float
    settings: str

    def gather(self, what: str, own: str, look: Callable[[], None]) -> list[str]:
        """Publish this rank's text and give those of all, by rank; `look` is called meanwhile."""
        store = self.seat.store
        store.set(self.seat.key(f"{what}/{self.seat.rank}"), own)
        keys = [self.seat.key(f"{what}/{peer}") for peer in range(self.size)]
        while not store.check(keys):
            try:
                look()
                self._check_time(keys)
            except Exception:
                if store.check(keys):  # complete by now: what was seen comes after it
                    break
                raise
            time.sleep(_POLL_S)
        return [store.get(key).decode() for key in keys]

    def _check_time(self, keys: list[str]) -> None:
        if time.monotonic() < self.deadline:
            return
        store = self.seat.store
        missing = ", ".join(str(peer) for peer, key in enumerate(keys) if not store.check([key]))
        raise LinkTimeoutError(
            f"expected all {self.size} ranks to start within {self.timeout_s:g} s; got nothing "
            f"from rank {missing}; where: rank {self.seat.rank}, process group '{self.name}'; "
            f"check that it runs and uses the same store, or raise the timeout"
        )


def _connect_in_newest(
    group: _Group, options: dict[str, Any], make: Callable[[core.Communicator], Any]
) -> Any:
    while True:
        try:
            return _connect(group, options, make)
        except NewGenerationError:
            group.seat.take()


def _connect(
    group: _Group, options: dict[str, Any], make: Callable[[core.Communicator], Any]
) -> Any:
    """connect() in one generation."""
    listener = core.Listener()
    addresses = [listener.address]
    if group.size > 1:
        addresses = _exchange_addresses(group, listener)
    try:
        communicator = listener.connect(
            group.seat.rank,
            addresses,
            name=group.name,
            timeout_s=max(group.deadline - time.monotonic(), 0.0),
            interrupt=group.seat.look,
            **options,
        )
    except PeerLostError:
        _look_for_reason(group.seat)
        raise
    try:
        made = make(communicator)
        _wait_until_all_are_connected(group, communicator)
    except BaseException:
        communicator.close()
        raise
    return made


def _exchange_addresses(group: _Group, listener: core.Listener) -> list[str]:
    seat = group.seat
    addresses = group.gather("address", listener.address, seat.look)
    deadline = time.monotonic() + _ANSWER_S

    def look() -> None:
        seat.look()
        if time.monotonic() > deadline:
            seat.begin_next()

    check_settings(group.gather("settings", group.settings, look), seat.rank, group.name)
    _check_reachable(addresses, seat.rank, group.name)
    # That two ranks are remote is the same seen from any rank, so that all decide alike.
    if any(core.is_remote(addresses[0], address) for address in addresses):
        _listen_tcp(seat, listener, addresses)
        addresses = group.gather("tcp", listener.address, seat.look)
    return addresses


def _wait_until_all_are_connected(group: _Group, communicator: core.Communicator) -> None:
    """A rank that fails late must find the others still listening to what it says."""

    def look() -> None:
        group.seat.look()
        communicator.check_peers()

    try:
        group.gather("connected", "", look)
    except TransportError:
        _look_for_reason(group.seat)
        raise
    except PipecommError:
        raise
    except RuntimeError:
        # The store has ended with its process, which may be done: what is wrong shows at first use.
        communicator.check_peers()


def _look_for_reason(seat: Seat) -> None:
    """Raise what the rank that has just broken a connection announces about it, if anything."""
    deadline = time.monotonic() + _REASON_S
    while time.monotonic() < deadline:
        seat.look()
        time.sleep(_POLL_S)


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


def _listen_tcp(seat: Seat, listener: core.Listener, addresses: list[str]) -> None:
    stacks = {_network_stack(address) for address in addresses}
    try:
        _finish_at_exit()
        listener.listen_tcp(_choose_address(allow_loopback=len(stacks) == 1))
    except Exception as error:
        seat.announce(f"rank {seat.rank} cannot be called from other hosts: {error}")
        raise


def _choose_address(allow_loopback: bool) -> str:
    try:
        return choose_address(allow_loopback=allow_loopback)
    except OSError as error:
        if error.errno is None:  # one of pipecomm's
            raise
        raise TransportError(
            f"cannot look for network interfaces: {core.describe_errno(error.errno)}"
        ) from error


@functools.cache
def _finish_at_exit() -> None:
    # Children of multiprocessing end by os._exit, which runs none of C's or Python's exit handlers.
    multiprocessing.util.Finalize(None, core.finish_bridges, exitpriority=0)


def _network_stack(address: str) -> tuple[str, str]:
    boot_id, namespace, *_ = address.split("|")
    return boot_id, namespace.rpartition("@")[2]  # without what sets it apart on purpose
