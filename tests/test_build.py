"""setup.py's decisions from its settings, and what holds for the sources as a whole."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from setuptools import Distribution

from pipecomm.torch_half import c10d_compile
from pipecomm.torch_half.c10d_compile import CompileError

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipecomm_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("   ", ""),
        ("9.0", "90-real"),
        ("9.0+PTX", "90"),
        ("8.0 8.6;9.0+PTX", "80-real;86-real;90"),
        ("8.0, 10.0a", "80-real;100a-real"),
        ("5.2 7.5 8.0", "80-real"),
    ],
)
@pytest.mark.parametrize("name", ["TORCH_CUDA_ARCH_LIST", "PIPECOMM_CUDA_ARCHS"])
def test_cuda_archs_of_a_valid_list_are_given_in_cmakes_words(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv(name, text)
    assert setup_py.cuda_archs() == expected


def test_cuda_archs_of_pipecomm_win_over_those_of_torch(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.setenv("PIPECOMM_CUDA_ARCHS", "9.0")
    assert setup_py.cuda_archs() == "90-real"


@pytest.mark.parametrize("text", ["abc", "90", "9.0+ptx", "8.0;;x", "sm_90", "9.0;$(id)"])
def test_cuda_archs_that_are_no_capabilities_are_refused_by_name(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST .* got '"):
        setup_py.cuda_archs()


def test_cuda_archs_that_are_all_too_old_are_refused(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "5.2;7.0")
    with pytest.raises(SystemExit, match=r"'5.2;7.0' names no architecture"):
        setup_py.cuda_archs()


@pytest.mark.parametrize("value", ["yes", "1", "ON"])
def test_cuda_mode_of_an_unknown_word_is_refused(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PIPECOMM_CUDA", value)
    with pytest.raises(SystemExit, match=f"auto, on or off; got '{value}'"):
        setup_py.cuda_mode()


@pytest.mark.parametrize(
    ("processors", "gib", "expected"), [(2, 16.0, 2), (64, 16.0, 8), (64, 1.0, 1), (2, 4.0, 2)]
)
def test_num_jobs_without_a_wish_fits_processors_and_memory(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, processors: int, gib: float, expected: int
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(setup_py, "memory_gib", lambda: gib)
    assert setup_py.num_jobs() == expected


@pytest.mark.parametrize(
    ("cgroup", "mount", "name"),
    [
        ("0::/a/b", "/ /cg rw - cgroup2 cgroup2 rw", "memory.max"),
        ("4:cpu:/x\n3:memory:/a/b", "/ /cg rw - cgroup cgroup rw,memory", "memory.limit_in_bytes"),
        ("0::/docker/1/a/b", "/docker/1 /cg rw - cgroup2 cgroup2 rw", "memory.max"),
    ],
)
def test_memory_limits_are_those_of_the_control_group_and_all_above(
    setup_py: Any, tmp_path: Path, cgroup: str, mount: str, name: str
) -> None:
    (tmp_path / "cg/a/b").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        f"22 1 0:21 / /tmp rw - tmpfs rw\n30 23 0:26 {mount}\n"
    )
    (tmp_path / "cg/a/b" / name).write_text("max\n")
    (tmp_path / "cg/a" / name).write_text("3000\n")
    (tmp_path / "cg" / name).write_text("4000\n")
    assert setup_py.memory_limits(tmp_path) == [3000, 4000]


def test_memory_of_a_system_without_control_groups_is_the_machines(
    setup_py: Any, tmp_path: Path
) -> None:
    assert setup_py.memory_limits(tmp_path) == []
    assert setup_py.memory_gib() > 0


@pytest.mark.parametrize("value", ["1", "64"])
def test_num_jobs_wished_for_are_taken(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    assert setup_py.num_jobs() == int(value)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_num_jobs_that_is_no_count_is_refused(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(SystemExit, match=f"MAX_JOBS .* got '{value}'"):
        setup_py.num_jobs()


@pytest.mark.parametrize("closed", ["", "build", "pipecomm.egg-info"])
def test_build_folder_of_a_checkout_that_cannot_be_written_is_temporary(
    setup_py: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    closed: str,
) -> None:
    (tmp_path / closed).mkdir(exist_ok=True)
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    assert setup_py.find_build_folder() == tmp_path / "build"
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / closed)
    folder = setup_py.find_build_folder()
    assert not folder.is_relative_to(tmp_path)
    assert f"{tmp_path} cannot be written; building in {folder}" in capsys.readouterr().out
    folder.rmdir()


def test_configure_without_ninja_falls_back_to_make_and_says_so(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_py, "find_tool", lambda _: None)
    assert "-GUnix Makefiles" in setup_py.configure_command("cmake", ["c++"], Path("b"))
    assert "ninja was not found; building with make" in capsys.readouterr().out


def test_find_torch_hidden_by_build_isolation_is_found_in_the_target_environment(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, fake_torch: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    paths = {"purelib": str(fake_torch.parent), "platlib": "/nonexistent"}
    monkeypatch.setattr(setup_py.sysconfig, "get_paths", lambda: paths)
    assert setup_py.find_torch() == fake_torch


def test_find_torch_that_is_not_installed_is_none(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    paths = {"purelib": str(tmp_path), "platlib": "/nonexistent"}
    monkeypatch.setattr(setup_py.sysconfig, "get_paths", lambda: paths)
    assert setup_py.find_torch() is None


@pytest.mark.parametrize("werror", ["1", "0"])
def test_torch_half_that_does_not_compile_stops_the_build_only_where_warnings_are_errors(
    setup_py: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fake_torch: Path,
    werror: str,
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise CompileError("does not compile")

    monkeypatch.setenv("PIPECOMM_WERROR", werror)
    monkeypatch.setattr(setup_py, "find_torch", lambda: fake_torch)
    monkeypatch.setattr(c10d_compile, "compile_module", fail)
    build = setup_py.BuildExt(Distribution())
    build.folder = tmp_path
    if werror == "1":
        with pytest.raises(SystemExit, match="does not compile"):
            build.build_torch_half(c10d_compile)
    else:
        assert build.build_torch_half(c10d_compile) is None
        assert (
            "does not compile\npipecomm: the torch half is tried again" in capsys.readouterr().out
        )


def test_python_sources_are_valid_for_the_oldest_supported_python() -> None:
    for path in (ROOT / "pipecomm").rglob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("sm_80 sm_90 sm_90a sm_100 sm_103 sm_120 sm_121", "80-real;90;100-real;120-real"),
        ("sm_80 sm_90 sm_90a", "80-real;90"),
        ("sm_80 sm_90 sm_100a sm_101", "80-real;90"),
        ("", "80-real;90"),
    ],
)
def test_default_cuda_archs_are_those_that_nvcc_knows(
    setup_py: Any, tmp_path: Path, codes: str, expected: str
) -> None:
    nvcc, script = tmp_path / "nvcc", tmp_path / "archs.cmake"
    lines = "".join(f"echo {code}\n" for code in codes.split())
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-code ] || exit 1\n{lines}')
    nvcc.chmod(0o755)
    script.write_text(f"""
set(PIPECOMM_CUDA off)
include({ROOT}/cmake/cuda.cmake)
set(CMAKE_CUDA_COMPILER {nvcc})
default_cuda_archs(ARCHS)
message(STATUS "archs ${{ARCHS}}.")
""")
    done = subprocess.run(
        [setup_py.find_tool("cmake"), "-P", script], capture_output=True, text=True, check=True
    )
    assert f"-- archs {expected}.\n" in done.stdout
