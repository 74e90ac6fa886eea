"""Hosts that are network namespaces without a name: they vanish with the process that made them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tests.ranks import RankFailure, run_ranks, spawn_ranks

__all__ = ["Hosts", "why_impossible"]

_CLONE_NEWNET = 0x40000000
_TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")


def why_impossible() -> str:
    """Why hosts cannot be made here; empty where they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return made.stderr.strip()


class Hosts:
    """`count` hosts with one interface each, eth0, at 10.77.0.1, 10.77.0.2, ...; and a switch."""

    def __init__(self, count: int) -> None:
        self._files: list[int] = []
        self._pids: list[int] = []
        holders = [_hold_namespace() for _ in range(count + 1)]
        try:
            for holder in holders:
                self._pids.append(holder.pid)
                self._files.append(os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY))
            self._connect(count)
        finally:
            for holder in holders:
                holder.kill()
                holder.wait()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            os.close(file)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, host: int, rate: str) -> None:
        """Limit what the host sends, as "200mbit"."""
        queue = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 50ms"
        self._run(host, queue)

    def set_cable(self, host: int, *, is_plugged: bool) -> None:
        """Only the switch's end goes down, as behind a real cable."""
        self._run(-1, f"ip link set port{host} {'up' if is_plugged else 'down'}")

    def sent_nbytes(self, host: int) -> int:
        text = self._run(host, "cat /proc/net/dev")
        (line,) = (line for line in text.splitlines() if "eth0:" in line)
        return int(line.split()[9])

    def run(
        self,
        placement: Sequence[int],
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[tuple[str, Any]]:
        """As run_ranks, rank r on host placement[r]."""
        return run_ranks(
            len(placement), _on_host, self._paths(placement), fn, args, timeout_s=timeout_s, env=env
        )

    def spawn(
        self,
        placement: Sequence[int],
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """As spawn_ranks, rank r on host placement[r]."""
        return spawn_ranks(
            len(placement), _on_host, self._paths(placement), fn, args, timeout_s=timeout_s, env=env
        )

    def _paths(self, placement: Sequence[int]) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{self._files[host]}" for host in placement]

    def _connect(self, count: int) -> None:
        self._run(-1, "ip link add switch type bridge")
        self._run(-1, "ip link set switch up")
        for host in range(count):
            peer = f"peer name eth0 netns {self._pids[host]}"
            self._run(-1, f"ip link add port{host} type veth {peer}")
            self._run(-1, f"ip link set port{host} master switch up")
            self._run(host, f"ip address add {self.address(host)}/24 dev eth0")
            self._run(host, "ip link set eth0 up")
            self._run(host, "ip link set lo up")

    def _run(self, host: int, command: str) -> str:
        """In the namespace of a host; -1 is the switch."""
        path = f"/proc/{os.getpid()}/fd/{self._files[host]}"
        done = subprocess.run(
            ["nsenter", f"--net={path}", *command.split()], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RankFailure(f"{command}: {done.stderr}")
        return done.stdout


def _hold_namespace() -> subprocess.Popen[bytes]:
    ready = "echo && exec sleep 60"
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "sh", "-c", ready],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    with holder.stdout:
        holder.stdout.readline()
    return holder


def _on_host(
    rank: int,
    size: int,
    store_path: str,
    namespaces: Sequence[str],
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    file = os.open(namespaces[rank], os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(file)
    return fn(rank, size, store_path, *args)
