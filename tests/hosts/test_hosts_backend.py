"""The torch.distributed backend between hosts: as on one host, several ranks per host."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pipecomm
from tests.drop_in import test_backend_groups, test_backend_p2p
from tests.drop_in.backend_ranks import Check, _run_checks, init, names
from tests.hosts.network import Hosts

_GLOO = {"GLOO_SOCKET_IFNAME": "eth0"}


def _failures(
    hosts: Hosts, placement: list[int], checks: tuple[Check, ...], world: str
) -> dict[str, str]:
    by_rank = hosts.spawn(placement, _run_checks, checks, world, timeout_s=120, env=_GLOO)
    return {
        name: f"rank {rank}: {text}"
        for rank, failures in enumerate(by_rank)
        for name, text in failures.items()
    }


@pytest.fixture(scope="module")
def pair_failures(hosts: Hosts) -> dict[str, str]:
    return _failures(hosts, [0, 1], test_backend_p2p.CHECKS, "pipecomm")


@pytest.mark.parametrize("name", names(test_backend_p2p.CHECKS))
def test_two_hosts(name: str, pair_failures: dict[str, str]) -> None:
    assert name not in pair_failures, pair_failures[name]


@pytest.fixture(scope="module")
def group_failures(hosts: Hosts) -> dict[str, str]:
    return _failures(hosts, [0, 0, 1, 2], test_backend_groups.CHECKS, "gloo")


@pytest.mark.parametrize("name", names(test_backend_groups.CHECKS))
def test_three_hosts_of_which_one_has_two_ranks(name: str, group_failures: dict[str, str]) -> None:
    assert name not in group_failures, group_failures[name]


def _send_quantized(rank: int, size: int, store_path: str) -> float:
    options = pipecomm.BackendOptions(codec="int8", grad_codec="int4")
    init(rank, size, store_path, pg_options=options)
    sent = torch.linspace(-1, 1, 1 << 20).reshape(1024, 1024)
    got = torch.empty_like(sent)
    work = dist.isend(sent, 1 - rank)
    dist.recv(got, 1 - rank)
    work.wait()
    dist.destroy_process_group()
    return float((got - sent).abs().max())


def test_codecs_of_the_backend_apply_and_their_bytes_are_what_crosses(hosts: Hosts) -> None:
    before = [hosts.sent_nbytes(host) for host in (0, 1)]
    of_int4, of_int8 = hosts.spawn([0, 1], _send_quantized)
    crossed = [hosts.sent_nbytes(host) - start for host, start in zip((0, 1), before, strict=True)]
    assert 0 < of_int8 < 0.01
    assert 0 < of_int4 < 0.1
    assert 1 << 20 < crossed[0] < 1.25 * (1 << 20)
    assert 1 << 19 < crossed[1] < 1.4 * (1 << 19)


def _meet_at_master(rank: int, size: int, store_path: str, port: int) -> str:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))
    dist.init_process_group("pipecomm", timeout=timedelta(seconds=30))
    got = torch.empty(1000)
    if rank == 0:
        dist.send(torch.full((1000,), 7.0), 1)
    else:
        dist.recv(got, 0)
        assert bool((got == 7).all())
    dist.destroy_process_group()
    return "fine"


def test_ranks_meet_at_an_address_of_the_first_host(hosts: Hosts) -> None:
    env = {"MASTER_ADDR": hosts.address(0)}
    assert hosts.spawn([0, 1], _meet_at_master, 29501, env=env) == ["fine", "fine"]


def _construct(rank: int, size: int, store_path: str) -> str:
    if rank == 1:
        os.environ["PIPECOMM_SOCKET_IFNAME"] = "nosuch0"
    try:
        init(rank, size, store_path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "connected"


def test_interface_that_is_not_there_is_told_to_all(hosts: Hosts) -> None:
    texts = hosts.spawn([0, 1], _construct)
    assert texts[1].startswith("ConfigError: expected network interfaces of this host in PIPECOMM_")
    assert "Found: lo" in texts[1]
    assert texts[0].startswith("StageFailedError: rank 1 cannot be called from other hosts")


def _paths(rank: int, size: int, store_path: str) -> list[str]:
    from pipecomm.links.rendezvous import connect

    communicator = connect(dist.FileStore(store_path, size), rank, size, name="paths", timeout_s=30)
    paths = [communicator.path(peer) for peer in range(size)]
    communicator.close()
    return paths


def test_each_peer_is_reached_by_the_shortest_way(hosts: Hosts) -> None:
    on_first, _, on_second = hosts.spawn([0, 0, 1], _paths)
    assert on_first[1] == "shared memory"
    assert on_first[2].startswith(f"TCP to {hosts.address(1)}:")
    assert on_second[0].startswith(f"TCP to {hosts.address(0)}:")
