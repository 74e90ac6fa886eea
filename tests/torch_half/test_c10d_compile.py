"""How the torch half is compiled: with which compiler, and what is said where that fails."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pipecomm.torch_half import c10d_compile
from pipecomm.torch_half.c10d_compile import CompileError

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "csrc"


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("cxx", ["/bin/false", "/nonexistent/g++", "sleep"])
def test_find_compiler_that_does_not_work_names_it_and_the_way_out(cxx: str) -> None:
    with pytest.raises(CompileError, match=f"CXX={re.escape(cxx)} does not .*Install one"):
        c10d_compile.find_compiler({"CXX": cxx})


def test_find_compiler_without_any_names_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"none of c\+\+, g\+\+, clang\+\+ compiles"):
        c10d_compile.find_compiler({})


def test_find_compiler_takes_the_words_of_cxx(tmp_path: Path) -> None:
    wrapper = write_script(tmp_path / "my wrapper", 'exec "$@"')
    assert c10d_compile.find_compiler({"CXX": f"'{wrapper}' c++"}) == [str(wrapper), "c++"]


def test_compile_that_is_killed_speaks_of_memory_and_max_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_torch: Path
) -> None:
    script = write_script(tmp_path / "cxx", "kill -9 $$")
    monkeypatch.setattr(c10d_compile, "find_compiler", lambda _: [str(script)])
    output = tmp_path / "out" / "module.so"
    output.parent.mkdir()
    with pytest.raises(CompileError, match=r"out of memory.*MAX_JOBS=1"):
        c10d_compile.compile_module(CSRC, fake_torch, tmp_path, os.environ, output)
    assert list(output.parent.iterdir()) == []


def test_compile_that_fails_shows_version_first_error_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_torch: Path
) -> None:
    script = write_script(tmp_path / "cxx", "echo noise; echo 'x.h:3: error: nothing'; exit 1")
    monkeypatch.setattr(c10d_compile, "find_compiler", lambda _: [str(script)])
    with pytest.raises(CompileError) as caught:
        c10d_compile.compile_module(CSRC, fake_torch, tmp_path, os.environ, tmp_path / "module.so")
    text = str(caught.value)
    assert "torch 9.8.7+test" in text
    assert "x.h:3: error: nothing" in text
    assert "noise" not in text
    assert str(CSRC / "torch" / "_c10d.cpp") in text
