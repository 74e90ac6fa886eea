"""Runs a function in several fresh processes, with a hard time limit and every traceback shown.

The processes are forked from a server that has imported torch and nothing else has happened in:
a rank starts in milliseconds, not in the seconds that the import takes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.patience import patient

__all__ = ["RankFailure", "run_ranks", "spawn_ranks"]

# Given to a rank to print its stacks before it is killed.
_GRACE_S = 1.0
# Every start of a process looks after all children, those of other threads too, and an exit code
# can be read once only: without the lock one of two threads would get 255.
_CHILDREN = threading.Lock()
# What the server imports before it forks.
_PRELOADED = ["torch", "torch.distributed", "pipecomm"]


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish; the text holds every traceback."""


def _child(
    connection: Connection,
    fn: Callable[..., Any],
    rank: int,
    size: int,
    store_path: str,
    env: Mapping[str, str],
    args: Any,
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A shell's background job ignores it, and so does what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_reader, args=(connection.fileno(),), daemon=True).start()
    # The server's environment is that of its first use.
    os.environ.clear()
    os.environ.update(env)
    try:
        import torch

        torch.set_num_threads(1)
        connection.send(("ok", fn(rank, size, store_path, *args)))
    except BaseException as error:
        connection.send(("raised", (repr(error), traceback.format_exc())))
    finally:
        connection.close()


def _end_with_reader(descriptor: int) -> None:
    """Who asked for this rank may be killed; the rank, perhaps waiting for minutes, then ends."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    os._exit(1)


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[tuple[str, Any]]:
    """Run fn(rank, size, store_path, *args) in `size` processes; give each rank's outcome.

    timeout_s is for an idle machine (tests/patience.py); `meanwhile` is called once, with the
    process ids of the ranks. An outcome is ("ok", result), ("raised", (repr, traceback)),
    ("died", exitcode) or ("hung", seconds). Never raises for what a rank does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    timeout_s = patient(timeout_s)
    outcomes: list[tuple[str, Any]] = [("hung", timeout_s)] * size
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        store_path = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=_child,
                args=(pipes[r][1], fn, r, size, store_path, environment, args),
                daemon=True,
            )
            for r in range(size)
        ]
        for process in processes:
            with _CHILDREN:
                process.start()
        for _, writer in pipes:
            writer.close()
        if meanwhile is not None:
            meanwhile([process.pid or 0 for process in processes])
        _collect(outcomes, [reader for reader, _ in pipes], processes, timeout_s)
        _stop(processes)
    return outcomes


def _collect(
    outcomes: list[tuple[str, Any]],
    readers: Sequence[Connection],
    processes: Sequence[Any],
    timeout_s: float,
) -> None:
    """Put in what the ranks say, and which of them died, until the time is over."""
    pending = {reader: rank for rank, reader in enumerate(readers)}
    deadline = time.monotonic() + timeout_s
    while pending and (left := deadline - time.monotonic()) > 0:
        for reader in wait(list(pending), timeout=left):
            rank = pending.pop(reader)  # type: ignore[arg-type]
            try:
                outcomes[rank] = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = ("died", _exit_code(processes[rank], 5))


def spawn_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """As run_ranks, but every rank must return: gives the results in rank order."""
    outcomes = run_ranks(size, fn, *args, timeout_s=timeout_s, env=env)
    bad = [
        f"rank {r}: {kind}: {_text(value)}"
        for r, (kind, value) in enumerate(outcomes)
        if kind != "ok"
    ]
    if bad:
        raise RankFailure("\n".join(bad))
    return [value for _, value in outcomes]


def _text(value: Any) -> str:
    return value[1] if isinstance(value, tuple) else str(value)


def _exit_code(process: Any, limit_s: float) -> int | None:
    """Once it has ended, which it has this time for; else None."""
    wait([process.sentinel], timeout=limit_s)
    with _CHILDREN:
        code: int | None = process.exitcode
        return code


def _stop(processes: list[Any]) -> None:
    for process in processes:
        if _exit_code(process, _GRACE_S) is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process.pid, signal.SIGUSR1)
            if _exit_code(process, _GRACE_S) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                _exit_code(process, 60)
