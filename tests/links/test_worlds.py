"""Ranks meet and exchange whatever their host names, users, addresses and shared memory are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import patient

_SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
_OWN_SHM = "mount -t tmpfs tmpfs /dev/shm && exec"
_NO_SHM = "mount -t tmpfs -o ro tmpfs /dev/shm && exec"
_WORLDS = {
    "tiny shared memory": ["unshare", "-m", "sh", "-c", f'{_SMALL_SHM} "$@"', "sh"],
    "read-only shared memory": ["unshare", "-m", "sh", "-c", f'{_NO_SHM} "$@"', "sh"],
    "equal host names and shared memory of their own": [
        *["unshare", "-mu", "sh", "-c", f'hostname same && {_OWN_SHM} "$@"', "sh"],
    ],
    "host names that begin alike and shared memory of their own": [
        *["unshare", "-mu", "sh", "-c", f'hostname node.$RANK && {_OWN_SHM} "$@"', "sh"],
    ],
    "other host names": ["unshare", "-u", "sh", "-c", 'hostname h$RANK && exec "$@"', "sh"],
    "a host name that does not resolve": [
        *["unshare", "-u", "sh", "-c", 'hostname nosuchhost && exec "$@"', "sh"],
    ],
    "another user without a home": ["setpriv", "--reuid=65534", "--clear-groups"],
}
_EXCHANGE = """
import datetime, sys
import torch, torch.distributed as dist
import pipecomm
dist.init_process_group("pipecomm", timeout=datetime.timedelta(seconds=30))
rank = dist.get_rank()
tensor = torch.full((5_000_000,), float(rank))
got = torch.empty(5_000_000)
work = dist.isend(tensor, 1 - rank)
dist.recv(got, 1 - rank)
work.wait()
assert (got == 1 - rank).all()
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make name spaces")
@pytest.mark.parametrize("world", list(_WORLDS))
def test_ranks_exchange_in(world: str, free_port: int) -> None:
    for output in _run_pair(_WORLDS[world], {"MASTER_ADDR": "127.0.0.1"}, free_port):
        assert output.endswith("fine\n")


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_ranks_meet_at(address: str, free_port: int) -> None:
    for output in _run_pair([], {"MASTER_ADDR": address}, free_port):
        assert output.endswith("fine\n")


def _run_pair(prefix: list[str], env: dict[str, str], port: int) -> list[str]:
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        command = [*prefix, sys.executable, "-W", "ignore", "-c", _EXCHANGE]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **env, **own, "HOME": "/nonexistent"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=patient(60))[0])
        finally:
            process.kill()
    return outputs


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
