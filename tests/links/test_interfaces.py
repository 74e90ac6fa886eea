"""The address that other hosts call is that of the interface named, or a sensible one."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from pipecomm.errors import ConfigError
from pipecomm.links import interfaces
from pipecomm.links.interfaces import choose_address


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIPECOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", ["PIPECOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_named_interface_is_taken(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "lo")
    assert ipaddress.ip_address(choose_address(allow_loopback=False)).is_loopback


def test_own_variable_comes_before_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert ipaddress.ip_address(choose_address(allow_loopback=False)).is_loopback


def test_missing_interface_is_refused_listing_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_SOCKET_IFNAME", "nosuch0,lo")
    with pytest.raises(ConfigError, match=r"PIPECOMM_SOCKET_IFNAME; got 'nosuch0,lo'.*Found: .*lo"):
        choose_address(allow_loopback=True)


@pytest.mark.parametrize(("master", "family"), [("127.0.0.1", 4), ("localhost", 4), ("::1", 6)])
def test_address_towards_the_master_is_taken(
    master: str, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    found = ipaddress.ip_address(choose_address(allow_loopback=True))
    assert found.is_loopback
    assert master == "localhost" or found.version == family


def test_loopback_is_not_offered_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [(1, "lo")])
    with pytest.raises(ConfigError, match=r"PIPECOMM_SOCKET_IFNAME to one of: lo \(127\.0\.0\.1"):
        choose_address(allow_loopback=False)


def test_names_that_do_not_resolve_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("no such host")

    monkeypatch.setenv("MASTER_ADDR", "nosuchhost")
    monkeypatch.setattr(interfaces.socket, "getaddrinfo", no_answer)
    ipaddress.ip_address(choose_address(allow_loopback=True))
