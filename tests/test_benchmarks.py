"""Every benchmark runs to its end, checks what it times, and prints one table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_ends_and_prints_one_table(name: str) -> None:
    run = subprocess.run(
        [sys.executable, name, "--rounds", "2"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("┏") == 1


def test_every_benchmark_is_named_with_its_command_in_the_docs() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    for name in NAMES:
        assert f"`python benchmarks/{name}" in page
