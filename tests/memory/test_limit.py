"""A pool in a process whose control group has a memory limit: an error instead of SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT = 128 * MIB


def own_group() -> tuple[Path, str]:
    """The folder of this process's control group, and what its memory limits are called."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
    return Path(f"/sys/fs/cgroup{lines[-1][2]}"), "memory.max"


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group below this process's own, limited to 128 MiB; empty when it is removed."""
    parent, name = own_group()
    group = parent / f"pipecomm-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / name).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def run_limited(group: Path, program: str) -> str:
    """What it prints, run with torch's own memory outside of the limit."""
    enter = f"""
        import os
        import torch
        from pipecomm.errors import PoolExhaustedError
        from pipecomm.memory.pool import MemoryPool
        with open({str(group / "cgroup.procs")!r}, "w") as procs:
            procs.write(str(os.getpid()))
        MIB = 1 << 20
        pool = MemoryPool()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(enter) + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


def test_request_beyond_the_limit_is_refused_and_a_smaller_one_works(limited_group: Path) -> None:
    output = run_limited(
        limited_group,
        """
        try:
            pool.empty((256 * MIB,), torch.uint8)
        except PoolExhaustedError as error:
            print(error)
        pool.empty((32 * MIB,), torch.uint8).fill_(1)
        print("smaller")
        """,
    )
    text, _, rest = output.partition("\n")
    assert rest == "smaller\n"
    for part in (f"{LIMIT} bytes", limited_group.name, "in use", "ask for less", "raise the limit"):
        assert part in text


def test_pool_that_fills_up_to_the_limit_ends_in_an_error_and_goes_on(limited_group: Path) -> None:
    output = run_limited(
        limited_group,
        """
        for _ in range(3):
            kept = []
            try:
                while True:
                    kept.append(pool.empty((3 * MIB,), torch.uint8).fill_(1))
            except PoolExhaustedError:
                print(len(kept))
            kept.clear()
            pool.trim()
        """,
    )
    assert all(60 < 3 * int(number) < 128 for number in output.split())
    assert len(output.split()) == 3
