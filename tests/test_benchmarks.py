"""Every benchmark runs to its end, checks what it times, and prints one table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.network import why_impossible
from tests.patience import patient

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))
NEEDS_A_GPU = {"codec_cuda.py", "p2p_cuda.py", "first_use_cuda.py", "engines_cuda.py"}
# Times nothing; tests/test_setups.py runs it.
PREDICTS = {"setups.py"}
# Those that train have steps instead of rounds.
SHORT = {
    "convergence.py": ["--steps", "2", "--seeds", "1", "--held-out", "1"],
    "codec_error.py": ["--steps", "2"],
    "codec.py": ["--rounds", "2", "--mib", "8"],
    "simulate.py": ["--ranks", "64"],
    "late_gradients.py": ["--steps", "25", "--seeds", "1", "--held-out", "1", "--rules", "dc"],
    "asynchronous.py": ["--rounds", "2", "--batches", "2"],
    "schedules.py": ["--rounds", "2", "--ranks", "4", "--schedules", "1f1b", "zb-h1"],
    "slow_links.py": ["--rounds", "2", "--ranks", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({*NAMES} - NEEDS_A_GPU - PREDICTS - {"p2p.py", "overlap.py", "shaped_link.py"})
)
def test_benchmark_ends_and_prints_one_table(name: str) -> None:
    assert _run(name, *SHORT.get(name, ["--rounds", "2"])).count("┏") == 1


def test_transfers_of_a_gpu_are_rehearsed_on_the_host() -> None:
    table = _run("p2p_cuda.py", "--device", "cpu", "--mib", "1", "--rounds", "2")
    for case in ("raw 1 MiB", "one way 4 KiB", "products beside", "int4 1 MiB"):
        assert case in table


def test_first_uses_of_a_gpu_are_rehearsed_on_the_host() -> None:
    table = _run("first_use_cuda.py", "--device", "cpu", "--rounds", "1")
    for mode in ("LAZY", "EAGER"):
        assert f"CUDA_MODULE_LOADING={mode}" in table


def _run(name: str, *options: str, timeout_s: float = 100) -> str:
    run = subprocess.run(
        [sys.executable, name, *options],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _column(table: str, title: str) -> list[float]:
    """The numbers below a title of a printed table."""
    lines = table.splitlines()
    titles = next(line for line in lines if line.startswith("┃"))
    index = [cell.strip() for cell in titles.strip("┃").split("┃")].index(title)
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    return [float(row[index]) for row in rows]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())
def test_step_over_a_shaped_link_sends_fewer_bytes_with_fewer_bits() -> None:
    table = _run("shaped_link.py", "--rounds", "2", "--rates", "1gbit")
    raw, int8, int4 = _column(table, "wire_nbytes")
    assert raw > 3 * int8 > 4 * int4 > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--warmup", "0"], ["--warmup", "5", "--rounds", "2"]])
def test_quick_p2p_ends_within_a_minute_with_one_table(options: list[str]) -> None:
    table = _run("p2p.py", "--quick", *options, timeout_s=60)
    assert table.count("┏") == 1
    nbytes = _column(table, "nbytes")
    assert (min(nbytes), max(nbytes)) == (4, 64 << 20)
    for low, middle, high in zip(
        *(_column(table, name) for name in ("p10_us", "median_us", "p90_us")), strict=True
    ):
        assert 0 < low <= middle <= high


@pytest.mark.slow
def test_full_p2p_says_first_how_long_it_will_take() -> None:
    output = _run("p2p.py", "--rounds", "2")
    assert "about " in output.split("┏")[0]


@pytest.mark.slow
def test_overlap_lies_between_nothing_and_all() -> None:
    table = _run("overlap.py", "--rounds", "2")
    assert all(0 <= percent <= 100 for percent in _column(table, "overlap_%"))


@pytest.mark.parametrize("name", sorted(NEEDS_A_GPU))
def test_benchmark_of_a_gpu_says_that_there_is_none(name: str) -> None:
    run = subprocess.run(
        [sys.executable, name],
        cwd=FOLDER,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert run.returncode == 3
    assert "expected a GPU" in run.stderr


def test_every_benchmark_is_named_with_its_command_in_the_docs() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    for name in NAMES:
        assert f"`python benchmarks/{name}" in page
