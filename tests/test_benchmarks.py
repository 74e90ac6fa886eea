"""Every benchmark runs to its end, checks what it times, and prints one table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))
# Those that train have steps instead of rounds.
NEEDS_A_GPU = {"codec_cuda.py"}
SHORT = {"convergence.py": ["--steps", "2", "--seeds", "1"], "codec_error.py": ["--steps", "2"]}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_A_GPU])
def test_benchmark_ends_and_prints_one_table(name: str) -> None:
    run = subprocess.run(
        [sys.executable, name, *SHORT.get(name, ["--rounds", "2"])],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("┏") == 1


@pytest.mark.parametrize("name", sorted(NEEDS_A_GPU))
def test_benchmark_of_a_gpu_says_that_there_is_none(name: str) -> None:
    run = subprocess.run(
        [sys.executable, name],
        cwd=FOLDER,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 3
    assert "expected a GPU" in run.stderr


def test_every_benchmark_is_named_with_its_command_in_the_docs() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    for name in NAMES:
        assert f"`python benchmarks/{name}" in page
