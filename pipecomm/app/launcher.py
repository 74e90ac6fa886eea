"""Starts the ranks of one job on this machine, watches them, and leaves nothing behind.

Knows nothing of what the ranks do: it gives them torch.distributed's variables, shows their output
with their rank in front, and hands on the events (JSON lines) they report.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecomm import settings
from pipecomm.app.rank import EXIT_OTHER_RANK
from pipecomm.errors import ConfigError
from pipecomm.outcome import ENDED_BY_ANOTHER, Event

__all__ = ["Outcome", "launch", "open_store"]

_HOST = "127.0.0.1"
_POLL_S = 0.05
# A lost rank is noticed by its peers within 2 s; their own messages say more than ours.
_GRACE_S = 2.5
# More, while all that have ended name another: that one, the first cause, is still ending.
_CAUSE_S = 15.0
_TERMINATE_S = 1.0
_READ_NBYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a job ended: 0, the exit code of the rank that failed first, or 128 + the number of a
    signal. 1 where a rank ended with 0 and others failed because of that.
    """

    exit_code: int
    text: str = ""


def open_store(port: int) -> Any:
    """The job's torch TCPStore, reachable on this machine only; port 0 takes a free one.

    It is bound before any rank starts, so no other job can take the port in between.
    Raises ConfigError when the port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_HOST, port))
        server.listen(128)
    except OSError as error:
        server.close()
        why = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise ConfigError(
            f"--port: expected a free port on {_HOST}; got {port}, which {why}; give another one, "
            "or leave --port out to have a free one chosen"
        ) from error
    port = server.getsockname()[1]
    # The store owns, and closes, the descriptor from here on.
    return TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )


def launch(
    command: Sequence[str], num_ranks: int, *, port: int = 0, on_event: Callable[[Event], None]
) -> Outcome:
    """Run `command` as ranks 0 to num_ranks - 1 until all have ended; none outlives this call.

    A rank that fails or is killed ends the job: the others get 2.5 s to end by themselves (17.5 s
    while all that have ended name another as the reason), then they are stopped. The outcome is
    that of the first cause: a rank that was killed, else one that failed and did not report another
    as the reason (as all do that use pipecomm), else one that ended with 0 and left them. SIGINT,
    SIGTERM and SIGHUP are passed on. Call it from the main thread.
    Raises ConfigError when the port is in use.
    """
    store = open_store(port)
    job = _Job(num_ranks, on_event)
    try:
        with _forwarding(job):
            job.start(command, store.port)
            while job.is_running:
                job.watch()
    finally:
        job.kill()
    return job.outcome()


@dataclass
class _Stream:
    """One end of a pipe, read as whole lines."""

    descriptor: int
    on_line: Callable[[str], None]
    rest: bytes = b""

    def read(self) -> bool:
        """Hand on what is there; False at the end."""
        chunk = os.read(self.descriptor, _READ_NBYTES)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if not chunk and self.rest:
            lines.append(self.rest)
        for line in lines:
            self.on_line(line.decode(errors="replace"))
        return bool(chunk)


@dataclass
class _End:
    """A descriptor of a process, which can be read once that has ended."""

    descriptor: int
    on_end: Callable[[], None]

    def read(self) -> bool:
        self.on_end()
        return False


@dataclass
class _Job:
    num_ranks: int
    on_event: Callable[[Event], None]
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    # In the order in which they ended.
    exit_codes: dict[int, int] = field(default_factory=dict)
    # Those that ended before they were told to, and those that said that another one was why.
    ended_alone: list[int] = field(default_factory=list)
    followers: set[int] = field(default_factory=set)
    stop_at_s: float | None = None
    kill_at_s: float | None = None
    received: int | None = None

    @property
    def is_running(self) -> bool:
        return len(self.exit_codes) < len(self.ranks)

    def start(self, command: Sequence[str], port: int) -> None:
        for rank in range(self.num_ranks):
            if self.received is not None:
                return
            output = self._open(functools.partial(_say, f"[rank {rank}] "))
            events = self._open(functools.partial(self._hand_on, rank))
            try:
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        env=_environment(rank, self.num_ranks, port, events),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=[events],
                        # A group of its own: the terminal's Ctrl-C comes through us only, and
                        # whatever the rank starts can be ended with it.
                        start_new_session=True,
                    )
                )
            finally:
                os.close(output)
                os.close(events)
            end = os.pidfd_open(self.ranks[rank].pid)
            ended = functools.partial(self._ended, rank)
            self.selector.register(end, selectors.EVENT_READ, _End(end, ended))

    def watch(self) -> None:
        """Wait a moment; pass output and events on; note who ended; stop the rest when due."""
        self._pump(_POLL_S)
        now_s = time.monotonic()
        if self.received is not None and self.kill_at_s is None:
            self._stop(self.received)
        elif self.kill_at_s is None and now_s > self._stops_at_s():
            left = ", ".join(map(str, self._left()))
            _say("pipecomm: ", f"stopping rank {left}: it does not end by itself")
            self._stop(signal.SIGTERM)
        elif self.kill_at_s is not None and now_s > self.kill_at_s:
            self._signal(signal.SIGKILL)

    def _stops_at_s(self) -> float:
        if self.stop_at_s is None:
            return float("inf")
        is_cause_left = self.followers.issuperset(self.ended_alone)
        return self.stop_at_s + (_CAUSE_S if is_cause_left else 0.0)

    def kill(self) -> None:
        """End what is left at once, with all that it started; show what it still said. Once only:
        the ranks' process ids are given back here.
        """
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _End):
                self._close(key.data)
        self._signal(signal.SIGKILL)
        for rank, process in enumerate(self.ranks):
            self.exit_codes.setdefault(rank, process.wait())
        while self._pump(0.0):
            pass
        for key in list(self.selector.get_map().values()):
            self._close(key.data)
        self.selector.close()

    def outcome(self) -> Outcome:
        if self.received is not None:
            name = signal.Signals(self.received).name
            return Outcome(128 + self.received, f"stopped by {name}")
        if not any(self.exit_codes[rank] for rank in self.ended_alone):
            return Outcome(0)
        # The first of the highest: max() keeps the order of their ends.
        cause = max(self.ended_alone, key=self._blame)
        code = self.exit_codes[cause]
        return Outcome(code or 1 if code >= 0 else 128 - code, self._describe(cause))

    def _ended(self, rank: int) -> None:
        # The process stays a zombie, so that its id is not given away.
        status = os.waitid(os.P_PID, self.ranks[rank].pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.exit_codes[rank] = code
        # What ends after a signal of ours did not fail by itself.
        if self.kill_at_s is not None:
            return
        self.ended_alone.append(rank)
        if code != 0 and self.stop_at_s is None:
            self.stop_at_s = time.monotonic() + _GRACE_S

    def _blame(self, rank: int) -> int:
        """Highest for the first cause: killed; failed by itself; left those that then failed."""
        code = self.exit_codes[rank]
        if code < 0:
            return 4
        if code == 0:
            return 2 if self.followers else 0
        if rank in self.followers:
            return 1
        # A code that our ranks use means something only where nobody reports.
        return 3 if self.followers or code != EXIT_OTHER_RANK else 2

    def _left(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank not in self.exit_codes]

    def _hand_on(self, rank: int, line: str) -> None:
        # A rank that is killed may leave half an event.
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if event.get("event") == ENDED_BY_ANOTHER:
                self.followers.add(rank)
            else:
                self.on_event(event)

    def _describe(self, rank: int) -> str:
        code = self.exit_codes[rank]
        where = f"rank {rank} of {self.num_ranks} (process {self.ranks[rank].pid})"
        if code == 0:
            return f"{where} ended, with exit code 0, while others still needed it"
        if code > 0:
            return f"{where} failed with exit code {code}"
        return f"{where} was lost: killed by {_signal_name(-code)}"

    def _stop(self, number: int) -> None:
        self.kill_at_s = time.monotonic() + _TERMINATE_S
        self._signal(number)

    def _signal(self, number: int) -> None:
        """To each rank's whole group; also where the rank has ended, its children may not have."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _open(self, on_line: Callable[[str], None]) -> int:
        reader, writer = os.pipe()
        self.selector.register(reader, selectors.EVENT_READ, _Stream(reader, on_line))
        return writer

    def _pump(self, timeout_s: float) -> bool:
        ready = self.selector.select(timeout_s)
        for key, _ in ready:
            if not key.data.read():
                self._close(key.data)
        return bool(ready)

    def _close(self, stream: _Stream | _End) -> None:
        self.selector.unregister(stream.descriptor)
        os.close(stream.descriptor)


@contextlib.contextmanager
def _forwarding(job: _Job) -> Iterator[None]:
    def remember(number: int, frame: object) -> None:
        job.received = number

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(rank: int, num_ranks: int, port: int, event_fd: int) -> Mapping[str, str]:
    # One thread per rank, as torchrun does; loopback, so that no host name has to resolve.
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {
        **defaults,
        **settings.environment(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # Makes every rank a client of the launcher's store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        settings.LAUNCHER_PID.name: str(os.getpid()),
        settings.EVENT_FD.name: str(event_fd),
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(prefix: str, line: str) -> None:
    print(prefix + line, file=sys.stderr, flush=True)
