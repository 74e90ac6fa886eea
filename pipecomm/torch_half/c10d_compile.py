"""How the torch half (csrc/torch/_c10d.cpp) is compiled; the only description of it.

Used by setup.py at install and by c10d_build at first use, so it imports nothing but the
standard library and never imports torch: a torch is known by its folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["CompileError", "compile_module", "find_compiler", "module_name", "torch_version"]

_FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wsign-conversion", "-Wshadow"),
    "-D_GLIBCXX_USE_CXX11_ABI=1",
    # After the words of CXX: linked with fast mathematics it would switch subnormals off in the
    # whole process. -O2 ends an -Ofast.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations"),
]
# No run path: _core has loaded libpipecomm and torch its own libraries before this one is
# loaded, and the loader takes what is already there by its name.
_LIBRARIES = ["-lpipecomm", "-ltorch_python", "-ltorch_cpu", "-lc10"]
_TIMEOUT_S = 900


class CompileError(Exception):
    """The torch half could not be compiled; the text says why and what to do."""


def torch_version(torch_folder: Path) -> str:
    """Version of the torch in this folder, such as "2.13.0+cpu"."""
    text = (torch_folder / "version.py").read_text()
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    if match is None:
        raise CompileError(f"no version found in {torch_folder / 'version.py'}")
    return match.group(1)


def module_name(csrc: Path, torch_folder: Path) -> str:
    """File name of the compiled module: torch version, digest of sources and flags, Python tag."""
    digest = hashlib.sha256(" ".join([*_FLAGS, *_LIBRARIES]).encode())
    for path in sorted(_included(csrc)):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return f"_c10d-{torch_version(torch_folder)}-{digest.hexdigest()[:12]}{suffix}"


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """Command of a working C++20 compiler: CXX there, else the first of c++, g++, clang++.

    Raises CompileError when there is none.
    """
    chosen = environment.get("CXX", "").strip()
    tried = [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]
    for command in tried:
        if shutil.which(command[0]) and _compiles(command):
            return command
    names = ", ".join(shlex.join(command) for command in tried)
    what = f"CXX={names} does not compile C++20" if chosen else f"none of {names} compiles C++20"
    raise CompileError(
        f"building pipecomm needs a C++20 compiler (g++ >= 11 or clang++ >= 14); {what}. "
        "Install one (Debian, Ubuntu: apt-get install g++) or set CXX to its path."
    )


def compile_module(
    csrc: Path,
    torch_folder: Path,
    library_folder: Path,
    environment: Mapping[str, str],
    output: Path,
    *,
    werror: bool = False,
) -> None:
    """Compile the torch half to `output`, which appears complete or not at all.

    library_folder holds libpipecomm.so; `environment` is that of the compiler. Temporaries live in
    output's folder. Raises CompileError.
    """
    compiler = find_compiler(environment)
    with tempfile.TemporaryDirectory(prefix="_building-", dir=output.parent) as folder:
        unfinished = Path(folder) / output.name
        command = _command(compiler, csrc, torch_folder, library_folder, unfinished)
        if werror:
            command.append("-Werror")
        _run(command, torch_version(torch_folder), {**environment, "TMPDIR": folder})
        os.replace(unfinished, output)


def _command(
    compiler: Sequence[str], csrc: Path, torch_folder: Path, library_folder: Path, output: Path
) -> list[str]:
    include = torch_folder / "include"
    system_folders = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
    ]
    return [
        *compiler,
        *_FLAGS,
        "-iquote",  # and not -I: <torch/...> must never be our folder of that name
        str(csrc),
        *(word for folder in system_folders for word in ("-isystem", str(folder))),
        str(_source(csrc)),
        "-o",
        str(output),
        f"-L{library_folder}",
        f"-L{torch_folder / 'lib'}",
        *_LIBRARIES,
    ]


def _run(command: list[str], torch: str, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the torch half for torch {torch} was not compiled: {error}") from error
    if done.returncode != 0:
        raise CompileError(_failure_text(command, torch, done.returncode, done.stdout))


def _failure_text(command: list[str], torch: str, code: int, output: str) -> str:
    head = f"the torch half for torch {torch} was not compiled: {command[0]} ended with {code}."
    if code in (-9, 137) or re.search(r"Killed|out of memory|Cannot allocate|bad_alloc", output):
        return (
            f"{head} The compiler ran out of memory; it needs about 2 GiB. "
            "Free some, or run fewer compilers at once (MAX_JOBS=1), and run the same again."
        )
    errors = [line for line in output.splitlines() if "error" in line.lower()] or [output.strip()]
    tail = "\n".join(errors[:5])
    return f"{head} First errors:\n{tail}\nThe command was:\n{shlex.join(command)}"


def _compiles(command: list[str]) -> bool:
    program = "#include <span>\n#include <string>\nint main() { return 0; }\n"
    try:
        done = subprocess.run(
            [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
            input=program,
            text=True,
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _source(csrc: Path) -> Path:
    return csrc / "torch" / "_c10d.cpp"


def _included(csrc: Path) -> set[Path]:
    """The source and every file of ours that it includes, directly or not."""
    found: set[Path] = set()
    left = [_source(csrc)]
    while left:
        path = left.pop()
        found.add(path)
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        left.extend(csrc / name for name in names if csrc / name not in found)
    return found
