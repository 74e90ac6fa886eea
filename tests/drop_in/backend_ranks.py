"""Runs a table of checks on real ranks: the processes start once, each check has a fresh group."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import pipecomm  # noqa: F401 - registers the backend
from tests.patience import patient
from tests.ranks import spawn_ranks

__all__ = ["GROUP_TIMEOUT_S", "Check", "failures_of", "init", "names", "wait_for_all"]

GROUP_TIMEOUT_S = 10.0

# check(rank, size, group): raises if something is wrong. `group` holds all ranks.
Check = Callable[[int, int, dist.ProcessGroup], None]


def init(
    rank: int, size: int, store_path: str, backend: str | None = "pipecomm", **options: Any
) -> None:
    """init_process_group over a FileStore."""
    options.setdefault("timeout", timedelta(seconds=patient(30)))
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, rank=rank, world_size=size, store=store, **options)


def wait_for_all(rank: int, size: int, store_path: str) -> None:
    """What a rank still does with this one must not fail because this one has ended."""
    store = dist.FileStore(f"{store_path}.ends", size)
    store.set(str(rank), "")
    store.wait([str(peer) for peer in range(size)], timedelta(seconds=patient(30)))


def names(checks: Sequence[Check]) -> list[str]:
    return [check.__name__ for check in checks]


def failures_of(
    size: int, checks: Sequence[Check], *, timeout_s: float = 120.0, world: str = "pipecomm"
) -> dict[str, str]:
    """Run all checks on `size` ranks; give the tracebacks of those that failed, by name.

    `world` is the backend of the default group; the checks get a pipecomm group.
    """
    failures: dict[str, str] = {}
    for rank, of_rank in enumerate(
        spawn_ranks(size, _run_checks, tuple(checks), world, timeout_s=timeout_s)
    ):
        for name, text in of_rank.items():
            failures[name] = f"{failures.get(name, '')}rank {rank}:\n{text}\n"
    return failures


def _run_checks(
    rank: int, size: int, store_path: str, checks: Sequence[Check], world: str
) -> dict[str, str]:
    init(rank, size, store_path, world)
    failures: dict[str, str] = {}
    for check in checks:
        # A rank whose check fails leaves the others waiting: they come later to the next group.
        group = dist.new_group(backend="pipecomm", timeout=timedelta(seconds=3 * GROUP_TIMEOUT_S))
        group.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
        try:
            check(rank, size, group)
        except BaseException:
            failures[check.__name__] = traceback.format_exc()
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return failures
