"""The steps of the device check, in the order in which they run, and what each one needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.device.steps import Machine, Need, Step

__all__ = ["plan"]

ROOT = Path(__file__).resolve().parents[2]
_BENCHMARKS = ROOT / "benchmarks"
# Each value once: how long the driver takes to load a kernel differs.
_LOADING = ("LAZY", "EAGER")
_WITH_SANITIZER = ("aligned", "hosts_bytes", "hosts_values", "stream_in_order")


def _silicon(what: str) -> Need:
    """For what no stand-in has: left out of a rehearsal, by name."""
    return lambda machine: "" if machine.num_gpus else f"needs silicon: {what}"


def _two_gpus(machine: Machine) -> str:
    return "" if machine.num_gpus > 1 else f"needs two GPUs; there are {machine.num_gpus}"


def _tool(name: str) -> Need:
    return lambda machine: "" if name in machine.tools else f"{name} is not on PATH"


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What makes tests and benchmarks use a GPU, or what stands in for it."""
    if not options.rehearse:
        return {"PIPECOMM_CHECK_DEVICE": "cuda"}
    env = {"PIPECOMM_CHECK_DEVICE": "cpu", "PIPECOMM_STAND_IN_DEVICE": "1"}
    if options.driver is not None:
        libraries = f"{options.driver.resolve()}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        env |= {"LD_LIBRARY_PATH": libraries.rstrip(":"), "FAKE_CUDA_STAND_IN": "1"}
        env |= {"FAKE_CUDA": "is_coherent=1"}
    return env


class _Steps:
    """Makes steps that run in one environment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.env = _environment(options)
        self.is_rehearsal = options.rehearse

    def tests(
        self,
        name: str,
        file: str,
        limit_s: float,
        *needs: Need,
        before: Sequence[str] = (),
        options: Sequence[str] = (),
        **env: str,
    ) -> Step:
        """Those of a file of this folder; `before`: a program that runs them."""
        command = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs"]
        command += [*options, f"tests/device/{file}.py"]
        return Step(name, command, limit_s, ROOT, {**self.env, **env}, needs)

    def benchmark(self, name: str, file: str, limit_s: float, *needs: Need) -> Step:
        """Its rows go into benchmarks/results, those of a rehearsal nowhere."""
        options = ["--json"]
        if self.is_rehearsal:
            options = ["--device", "cpu"] + (["--mib", "1", "--rounds", "2"] * (file == "p2p_cuda"))
        command = [sys.executable, f"{file}.py", *options]
        return Step(name, command, limit_s, _BENCHMARKS, self.env, needs)


def plan(options: argparse.Namespace) -> list[Step]:
    """All steps; `options` are those of check.py."""
    make = _Steps(options)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "-e",
        ".",
    ]
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all")
    return [
        Step(
            *("build", install, 150, ROOT, {"PIPECOMM_CUDA": "on"}),
            [_silicon("a rehearsal runs what is built")],
        ),
        make.tests(
            *("codec bytes equal the host's", "test_codec_cuda", 90),
            _silicon("kernels; tests/simt and tests/fake_cuda run their source on the host"),
        ),
        make.tests("paths: slots, IPC, through the host", "test_paths_cuda", 60),
        make.tests("two processes on one GPU", "test_transport_cuda", 120),
        make.tests("pipelines on one GPU", "test_pipeline_cuda", 120),
        make.tests(
            *("each process on its own GPU only", "test_own_gpu_cuda", 60),
            *(_two_gpus, _tool("nvidia-smi")),
        ),
        *(
            make.tests(
                *(f"peer killed meanwhile, {mode.lower()} loading", "test_survivor_cuda", 60),
                CUDA_MODULE_LOADING=mode,
            )
            for mode in _LOADING
        ),
        make.tests(
            *("illegal access in one rank", "test_broken_cuda", 60),
            _silicon("a device that can fail; tests/fake_cuda breaks its own"),
        ),
        make.tests(
            *("memory full of torch's cache", "test_full_cuda", 60),
            _silicon("memory that ends and torch's cache of it"),
        ),
        make.tests(
            *("codecs under compute-sanitizer", "test_codec_cuda", 120),
            *(_silicon("kernels on a device"), _tool("compute-sanitizer")),
            before=sanitizer,
            options=["-k", f"({' or '.join(_WITH_SANITIZER)}) and not float16"],
        ),
        make.benchmark("first use of a device", "first_use_cuda", 60),
        make.benchmark("transfers beside matrix products", "p2p_cuda", 90),
        make.benchmark(
            "codecs against the copy rate", "codec_cuda", 90, _silicon("kernels and their clock")
        ),
        make.benchmark(
            *("what waits for multiprocessors", "engines_cuda", 60),
            _silicon("multiprocessors and copy engines"),
        ),
    ]
