"""Starting ranks on this machine: what they are given, how they end, that nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipecomm.app.launcher import Outcome, launch, open_store
from pipecomm.errors import ConfigError
from tests.patience import patient

# Generous: a loaded machine needs seconds to start a Python.
LIMIT_S = 60.0
ROOT = Path(__file__).resolve().parent.parent.parent

# The rank's side without the package's __init__, which imports torch: that takes seconds per rank.
RANK = f"""
import json, os, signal, subprocess, sys, time, types
package = types.ModuleType("pipecomm")
package.__path__ = [{str(ROOT / "pipecomm")!r}]
sys.modules["pipecomm"] = package
from pipecomm.app.rank import die_with_launcher
from pipecomm.outcome import event_pipe
rank = int(os.environ["RANK"])
send = event_pipe()
"""


def rank_command(script: str) -> list[str]:
    return [sys.executable, "-c", RANK + script]


def run(script: str, num_ranks: int = 2) -> tuple[Outcome, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return launch(rank_command(script), num_ranks, on_event=events.append), events


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + patient(limit_s)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_get_the_variables_of_torch_distributed() -> None:
    outcome, events = run(
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR']\n"
        "send({name: os.environ[name] for name in names})"
    )
    assert outcome == Outcome(0)
    assert sorted(events, key=lambda event: str(event["RANK"])) == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        for rank in range(2)
    ]


def test_ranks_meet_at_the_launchers_store() -> None:
    script = """
sys.modules.pop("pipecomm")
from torch.distributed import rendezvous
store, _, _ = next(rendezvous("env://"))
store.set(str(rank), str(rank * 7))
send({"other": store.get(str(1 - rank)).decode()})
"""
    outcome, events = run(script)
    assert outcome == Outcome(0)
    assert sorted(event["other"] for event in events) == ["0", "7"]


def test_output_goes_to_stderr_line_by_line_with_the_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    outcome, _ = run("print('one\\ntwo'); print('three', file=sys.stderr); print('end', end='')")
    captured = capfd.readouterr()
    assert outcome == Outcome(0)
    assert captured.out == ""
    for rank in range(2):
        own = [line for line in captured.err.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert {line.removeprefix(f"[rank {rank}] ") for line in own} == {
            "one",
            "two",
            "three",
            "end",
        }


def test_many_large_events_arrive_whole_and_in_order() -> None:
    outcome, events = run("for k in range(300): send({'k': k, 'text': 'x' * 3000})", num_ranks=1)
    assert outcome == Outcome(0)
    assert [event["k"] for event in events] == list(range(300))


def test_half_an_event_is_dropped() -> None:
    script = "send({'k': 1}); os.write(int(os.environ['PIPECOMM_EVENT_FD']), b'{\"k\": ')"
    assert run(script, num_ranks=1) == (Outcome(0), [{"k": 1}])


def test_failed_rank_ends_the_job_with_its_exit_code() -> None:
    outcome, events = run("send({'pid': os.getpid()}); sys.exit(7) if rank else time.sleep(300)")
    assert outcome.exit_code == 7
    assert "rank 1 of 2" in outcome.text
    assert "exit code 7" in outcome.text
    assert not any(is_running(event["pid"]) for event in events)


def test_killed_rank_ends_the_job_with_its_signal(capfd: pytest.CaptureFixture[str]) -> None:
    outcome, _ = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(300)")
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert "rank 0 of 2" in outcome.text
    assert "SIGKILL" in outcome.text
    assert "stopping rank 1" in capfd.readouterr().err


def test_rank_that_ignores_sigterm_is_killed() -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
send({"pid": os.getpid()})
sys.exit(5) if rank else time.sleep(300)
"""
    outcome, events = run(script)
    assert outcome.exit_code == 5
    assert not any(is_running(event["pid"]) for event in events)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("sys.exit(3)", "sys.exit(9)", 9),
        ("sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("sys.exit(1)", "os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("sys.exit(4)", "sys.exit(3)", 4),
        ("sys.exit(3)", "time.sleep(300)", 3),
    ],
)
def test_outcome_is_that_of_the_rank_to_blame(first: str, second: str, expected: int) -> None:
    """A rank often hears of the other's end, and ends, before the launcher sees either."""
    outcome, _ = run(f"{first} if rank == 0 else (time.sleep(0.2), {second})")
    assert outcome.exit_code == expected


def test_what_a_rank_started_ends_with_the_job() -> None:
    script = """
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
send({"pid": child.pid})
"""
    outcome, events = run(script)
    assert outcome == Outcome(0)
    assert len(events) == 2
    wait_until(lambda: not any(is_running(event["pid"]) for event in events))


def test_program_that_cannot_be_started_leaves_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        launch(["/nowhere/python"], 2, on_event=print)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_handlers_and_descriptors_are_as_before() -> None:
    run("")  # what torch opens once
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    descriptors = len(os.listdir("/proc/self/fd"))
    run("")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_port_in_use_is_refused_before_any_rank_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"got {port}, which is in use.*leave --port out"):
            launch(["/nowhere/python"], 2, port=port, on_event=print)


def test_given_port_is_used_and_free_again_afterwards() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        store = open_store(port)
        assert store.port == port
        del store


def test_stores_at_once_have_their_own_ports() -> None:
    stores = [open_store(0) for _ in range(4)]
    for number, store in enumerate(stores):
        store.set("number", str(number))
    assert [store.get("number") for store in stores] == [b"0", b"1", b"2", b"3"]
    assert len({store.port for store in stores}) == 4


def test_store_is_reachable_on_this_machine_only() -> None:
    store = open_store(0)
    lines = [line for name in ("tcp", "tcp6") for line in listening(name)]
    own = {address for address in lines if address.endswith(f":{store.port:04X}")}
    assert own == {f"0100007F:{store.port:04X}"}


def listening(name: str) -> Iterator[str]:
    for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
        yield line.split()[1]


LAUNCHER = """
import sys
from pipecomm.app.launcher import launch
outcome = launch({command!r}, 4, on_event=lambda event: print(event["pid"], flush=True))
print(outcome.text, file=sys.stderr)
sys.exit(outcome.exit_code)
"""


@contextlib.contextmanager
def launcher_of_four() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher in its own process, and its four ranks, which sleep."""
    command = rank_command("die_with_launcher(); send({'pid': os.getpid()}); time.sleep(300)")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(command=command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids += [int(process.stdout.readline()) for _ in range(4)]
        yield process, pids
    finally:
        process.kill()
        process.communicate()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_all_ranks(number: signal.Signals) -> None:
    with launcher_of_four() as (process, pids):
        process.send_signal(number)
        _, errors = process.communicate(timeout=patient(LIMIT_S))
        assert process.returncode == 128 + number
        assert f"stopped by {number.name}" in errors
        assert "Traceback" not in errors
        assert not any(map(is_running, pids))


def test_kill_of_the_launcher_ends_all_ranks() -> None:
    with launcher_of_four() as (process, pids):
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_running, pids)), limit_s=15)


def test_rank_whose_launcher_is_gone_already_ends_at_once() -> None:
    environment = {**os.environ, "RANK": "0", "PIPECOMM_LAUNCHER_PID": "1"}
    command = rank_command("die_with_launcher(); print('still here')")
    ended = subprocess.run(
        command,
        env=environment,
        timeout=patient(LIMIT_S),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "")
