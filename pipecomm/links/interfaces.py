"""Which address of this host the ranks on other hosts should call: by interface, or by a guess."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from pipecomm import settings
from pipecomm.errors import ConfigError

__all__ = ["check_interfaces", "choose_address"]

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def choose_address(*, allow_loopback: bool) -> str:
    """A numeric IPv4 or IPv6 address of this host.

    The first that there is of: the interface in PIPECOMM_SOCKET_IFNAME, that in
    GLOO_SOCKET_IFNAME, the address this host uses to reach MASTER_ADDR, the address of its host
    name, any interface's. Loopback addresses count if they are allowed or an interface was named.
    Raises ConfigError, listing the interfaces, when a named one is missing or there is no address.
    """
    for setting in (settings.SOCKET_IFNAME, settings.GLOO_SOCKET_IFNAME):
        if setting.text():
            check_interfaces(setting)
            return _address_of_first(setting)
    for address in _guesses():
        if allow_loopback or not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        "expected an address at which ranks on other hosts can call this one; got only loopback; "
        f"set PIPECOMM_SOCKET_IFNAME to one of: {_listed()}"
    )


def check_interfaces(setting: settings.Setting[tuple[str, ...]]) -> None:
    """Raise ConfigError if the environment variable names an interface that is not there."""
    found = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in setting.value() if name not in found]
    if wrong:
        raise ConfigError(
            f"expected network interfaces of this host in {setting.name}; got {setting.text()!r}, "
            f"and {', '.join(wrong)} is not there. Found: {', '.join(found)}"
        )


def _address_of_first(setting: settings.Setting[tuple[str, ...]]) -> str:
    for name in setting.value():
        for address in _addresses(name):
            return address
    raise ConfigError(
        f"expected an interface with an address in {setting.name}; got {setting.text()!r}; "
        f"found: {_listed()}"
    )


def _guesses() -> Iterator[str]:
    if master := settings.MASTER_ADDR.text():
        yield from _route_to(master)
    try:
        known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    own = [address for _, name in socket.if_nameindex() for address in _addresses(name)]
    # A name may stand for an address that this host does not have (any more).
    yield from (address for *_, (address, *_) in known if address in own)
    yield from sorted(own, key=lambda address: ipaddress.ip_address(address).is_loopback)


def _route_to(host: str) -> Iterator[str]:
    """The addresses this host would send from. Nothing is sent."""
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, _, _, target in targets:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            yield probe.getsockname()[0]


def _addresses(name: str) -> Iterator[str]:
    """Of one interface: IPv4 first, then IPv6 without those that need a scope."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        with contextlib.suppress(OSError):  # without an IPv4 address
            yield socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    for packed, *_, interface in (line.split() for line in lines):
        address = ipaddress.IPv6Address(bytes.fromhex(packed))
        if interface == name and not address.is_link_local:
            yield str(address)


def _listed() -> str:
    return ", ".join(
        f"{name} ({', '.join(_addresses(name)) or 'no address'})"
        for _, name in socket.if_nameindex()
    )
