"""Finds the torch half for the running torch, builds it once where there is none, and loads it.

Looked for in the package (built at install), then in the user's cache: the first folder from which
this user alone can run what it wrote. A build holds a file
lock, which ends with its process; what a killed build left is removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from pipecomm import _native, settings
from pipecomm.errors import NotBuiltError
from pipecomm.torch_half.c10d_compile import (
    CompileError,
    compile_module,
    module_name,
    torch_version,
)

__all__ = ["load", "load_if_built"]

_PACKAGE = Path(__file__).resolve().parent.parent
_MODULE = "pipecomm._c10d"
_one_at_a_time = threading.Lock()


def load(torch: ModuleType) -> ModuleType:
    """The _c10d module, built for this torch.

    The first call for a torch that the installation was not built for compiles it (about 20 s);
    of several processes one compiles and the others wait. Raises NotBuiltError when that fails.
    """
    with _one_at_a_time:
        if _MODULE not in sys.modules:
            _native.core.build_info()  # raises when libpipecomm is not there to link with
            assert torch.__file__ is not None
            torch_folder = Path(torch.__file__).parent
            try:
                path = _find_or_build(torch_folder)
            except CompileError as error:
                raise NotBuiltError(f"{error}{_what_is_there(torch_folder)}") from error
            sys.modules[_MODULE] = _load_file(path, torch_folder)
        return sys.modules[_MODULE]


def load_if_built(torch: ModuleType) -> ModuleType | None:
    """The _c10d module where load() would compile nothing; else None."""
    with contextlib.suppress(NotBuiltError, CompileError):
        if _MODULE in sys.modules or _is_built(torch):
            return load(torch)
    return None


def _is_built(torch: ModuleType) -> bool:
    assert torch.__file__ is not None
    name = module_name(_csrc(), Path(torch.__file__).parent)
    return any((folder / name).is_file() for folder in (_PACKAGE, *_cache_candidates()))


def _find_or_build(torch_folder: Path) -> Path:
    csrc = _csrc()
    name = module_name(csrc, torch_folder)
    if (_PACKAGE / name).is_file():
        return _PACKAGE / name
    _refuse_other_sources(name)
    cache = _cache_folder()
    path = cache / name
    if not path.is_file():
        with _locked(cache):
            if not path.is_file():
                _build(csrc, torch_folder, path)
    return path


def _refuse_other_sources(name: str) -> None:
    """Raise where the package was built, for this torch and Python, from other sources.

    A torch half of the sources as they are now would not fit the libpipecomm.so beside it.
    """
    of_other_sources = re.sub(r"-[0-9a-f]{12}\.", "-*.", name)
    built = [path.name for path in _PACKAGE.glob(of_other_sources)]
    if built:
        raise NotBuiltError(
            f"expected {name} beside {_PACKAGE.name}/libpipecomm.so; found {', '.join(built)}: the "
            "sources changed since pipecomm was built. Install it again: "
            "pip install --no-build-isolation -e ."
        )


def _build(csrc: Path, torch_folder: Path, path: Path) -> None:
    for leftover in path.parent.glob("_building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    print(
        f"pipecomm: building the torch half for torch {torch_version(torch_folder)} (about 20 s, "
        f"once) into {path.parent}",
        file=sys.stderr,
        flush=True,
    )
    compile_module(csrc, torch_folder, _PACKAGE, settings.environment(), path)


def _load_file(path: Path, torch_folder: Path) -> ModuleType:
    loader = ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NotBuiltError(
            f"{path} cannot be loaded with torch {torch_version(torch_folder)}: {error}. "
            "Remove the file and run again: it is built anew. Where it may not be mapped, set "
            "XDG_CACHE_HOME to a folder whose files may be run."
        ) from error
    return module


def _csrc() -> Path:
    installed = _PACKAGE / "_src" / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def _what_is_there(torch_folder: Path) -> str:
    built = sorted({path.name.split("-")[1] for path in _PACKAGE.glob("_c10d-*.so")})
    return (
        f" The running torch is {torch_version(torch_folder)}; this installation has the torch "
        f"half for {' and '.join(built) or 'no torch'}."
    )


def _cache_folder() -> Path:
    """A folder that only this user can write to; one for this process alone as a last resort.

    Raises NotBuiltError where that one is mounted noexec, as all before it were or could not be
    used.
    """
    for folder in _cache_candidates():
        if _is_private(folder) and _may_be_run(folder):
            return folder
    folder = Path(tempfile.mkdtemp(prefix="pipecomm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not _may_be_run(folder):
        raise NotBuiltError(
            "expected a folder of this user for the torch half whose files may be run; got "
            f"{', '.join(map(str, _cache_candidates()))} and {folder.parent}: mounted noexec, or "
            "not private. Set XDG_CACHE_HOME to a folder on another mount."
        )
    return folder


def _cache_candidates() -> Iterator[Path]:
    chosen = Path(settings.XDG_CACHE_HOME.value())
    home = Path(os.path.expanduser("~"))
    if chosen.is_absolute():
        yield chosen / "pipecomm"
    elif home.is_dir():
        yield home / ".cache" / "pipecomm"
    yield Path(tempfile.gettempdir()) / f"pipecomm-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        with _locked(folder):
            pass
    except OSError:
        return False
    others_can_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and not others_can_write


def _may_be_run(folder: Path) -> bool:
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
