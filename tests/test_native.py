"""The core is there, or its absence is explained with the command to run."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from pipecomm import _native
from pipecomm._version import __version__
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


def test_core_is_built_for_this_version() -> None:
    assert _native.problem is None
    info = _native.core.build_info()
    assert info["version"] == __version__
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert info["cuda"] == bool(info["nvcc"]) == bool(info["cuda_archs"])


def run_copied_package(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with a copy of the loader and no other pipecomm in reach (-S: no site-packages)."""
    package = folder / "pipecomm"
    package.mkdir(parents=True, exist_ok=True)
    for name in ("_native.py", "_version.py", "errors.py"):
        (package / name).write_bytes((ROOT / "pipecomm" / name).read_bytes())
    (package / "__init__.py").touch()
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


USE_CORE = """
import pipecomm._native as native
try:
    native.core.dtype_nbytes("float32")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_core_missing_in_the_source_folder_warns_once_and_raises_with_the_command(
    tmp_path: Path,
) -> None:
    (tmp_path / "CMakeLists.txt").touch()
    done = run_copied_package(tmp_path, USE_CORE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert done.stdout.startswith("NotBuiltError")
    assert f"-m pip install -e {tmp_path}" in done.stdout
    assert "another folder" in done.stdout


def test_core_missing_in_an_installation_says_to_install_again(tmp_path: Path) -> None:
    done = run_copied_package(tmp_path, USE_CORE)
    assert "--force-reinstall" in done.stdout


def test_core_of_another_python_names_both(tmp_path: Path) -> None:
    package = tmp_path / "pipecomm"
    package.mkdir()
    (package / "_core.cpython-399-x86_64-linux-gnu.so").touch()
    done = run_copied_package(tmp_path, USE_CORE)
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    assert re.search(rf"is _core\.cpython-399.*needs _core\.{tag}", done.stdout)


def test_core_that_cannot_be_loaded_gives_the_loaders_reason(tmp_path: Path) -> None:
    package = tmp_path / "pipecomm"
    package.mkdir()
    (package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"broken")
    done = run_copied_package(tmp_path, USE_CORE)
    assert re.search(
        r"NotBuiltError.*cannot be loaded: .*(file too short|invalid ELF)", done.stdout
    )


def test_core_of_another_version_names_both(tmp_path: Path) -> None:
    package = tmp_path / "pipecomm"
    package.mkdir()
    (package / "_core.py").write_text("def build_info(): return {'version': '0.0.9'}\n")
    done = run_copied_package(tmp_path, USE_CORE)
    assert f"pipecomm {__version__} found an extension of version 0.0.9" in done.stdout
