"""Tells what of pipecomm works on this machine and why the rest does not. Never fails itself.

A finding is {"part", "state": "ok" | "missing" | "broken", "text"}.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from pipecomm import settings
from pipecomm._version import __version__

__all__ = ["examine", "format_findings"]

Finding = dict[str, str]

_TRY_TIMEOUT_S = 10.0
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE_PRIVATE = 1 | 128
_PACKAGE = Path(__file__).resolve().parent.parent


class _MissingPartError(Exception):
    """A part that is not there, which is no fault; the text says why."""


def examine() -> list[Finding]:
    """Look at every part; what goes wrong on the way is a finding too."""
    return [_find(part, look) for part, look in _PARTS.items()]


def format_findings(findings: list[Finding]) -> str:
    """One line per finding."""
    width = max(len(finding["part"]) for finding in findings)
    return "\n".join(
        f"{finding['part']:{width}}  {finding['state']:8} {finding['text']}" for finding in findings
    )


def _find(part: str, look: Callable[[], str]) -> Finding:
    try:
        return {"part": part, "state": "ok", "text": look()}
    except _MissingPartError as error:
        return {"part": part, "state": "missing", "text": str(error)}
    # SystemExit too: the report is needed most where modules misbehave.
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"part": part, "state": "broken", "text": text}


def _package() -> str:
    return f"pipecomm {__version__} in {_PACKAGE}"


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, Linux {platform.release()}, {cores} cores for this process"


def _core() -> ModuleType:
    """The extension. Raises _MissingPartError or what loading it raised."""
    native = importlib.import_module("pipecomm._native")
    if native.problem is None:
        core: ModuleType = native.core
        return core
    if not list(_PACKAGE.glob("_core*.so")):
        raise _MissingPartError(native.problem)
    raise ImportError(native.problem)


def _extension() -> str:
    built = _core().build_info()
    return f"version {built['version']}, {built['compiler']}, {built['build_type']}"


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        raise _MissingPartError("not installed: pip install torch")
    torch = importlib.import_module("torch")
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}"


def _torch_half() -> str:
    _core()
    _torch()
    found = sorted(path.name for path in _PACKAGE.glob("_c10d-*.so"))
    compiling = importlib.import_module("pipecomm.torch_half.c10d_compile")
    building = importlib.import_module("pipecomm.torch_half.c10d_build")
    folder = Path(str(importlib.import_module("torch").__file__)).parent
    wanted = compiling.module_name(building._csrc(), folder)
    built_for = ", ".join(name.split("-")[1] for name in found) or "no torch"
    if wanted in found:
        return f"built for torch {compiling.torch_version(folder)}"
    raise _MissingPartError(
        f"built for {built_for}, running torch {compiling.torch_version(folder)}: the first "
        "process group builds it once (about 20 s, needs g++)"
    )


def _backend() -> str:
    _core()
    _torch()
    importlib.import_module("pipecomm.drop_in.backend")
    names = importlib.import_module("torch.distributed").Backend.backend_list
    if "pipecomm" not in names:
        raise RuntimeError(f"expected 'pipecomm' among torch's backends; got {', '.join(names)}")
    return 'registered: torch.distributed.init_process_group("pipecomm")'


def _codecs() -> str:
    core = _core()
    return f"instruction set {core.codec_isa()}, out of {', '.join(core.codec_isas())}"


def _cuda() -> str:
    built = _core().build_info()
    if built["cuda"]:
        archs, nvcc = built["cuda_archs"], built["nvcc"]
        return f"codecs and transfers for {archs}, nvcc {nvcc}; not yet run on a GPU"
    raise _MissingPartError(
        "not built: at build time no nvcc, one older than 12.5, or PIPECOMM_CUDA=off"
    )


def _driver_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _MissingPartError(f"no driver of an NVIDIA GPU here: {error}") from error


def _cuda_driver() -> str:
    """Raises where the toolkit that pipecomm was built with is of a newer major version."""
    number = ctypes.c_int(0)
    status = _driver_library().cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise RuntimeError(f"expected cuDriverGetVersion to succeed; got CUresult {status}")
    driver = (number.value // 1000, number.value % 1000 // 10)
    has = f"for CUDA {driver[0]}.{driver[1]}"
    nvcc = str(_core().build_info()["nvcc"])
    if not nvcc:
        return f"{has}; pipecomm was built without CUDA"
    toolkit = (int(nvcc.split(".")[0]), int(nvcc.split(".")[1]))
    if toolkit[0] > driver[0]:
        raise RuntimeError(
            f"expected a driver for CUDA {toolkit[0]}.0 or newer, since pipecomm was built with "
            f"nvcc {nvcc}; got one {has}. Update it, or build with a toolkit of CUDA {driver[0]}"
        )
    if toolkit > driver:
        return f"{has}, older than nvcc {nvcc}: only GPUs of the architectures above"
    return f"{has}; pipecomm was built with nvcc {nvcc}"


def _nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise _MissingPartError("not found: CUDA parts cannot be built here; the host parts can")
    return found


def _compiler() -> str:
    # It may come with a cache before it and options behind: "ccache g++ -m64".
    name = settings.CXX.text() or "g++"
    try:
        programs = [word for word in shlex.split(name) if not word.startswith("-")]
    except ValueError as error:
        raise _MissingPartError(
            f"expected the name of a program in CXX; got {name}: {error}"
        ) from None
    found = [shutil.which(program) for program in programs]
    if found and all(found):
        return " ".join(path for path in found if path is not None)
    other = shutil.which("clang++")
    if other is None:
        raise _MissingPartError(f"no {name} and no clang++: only needed to build")
    return other


def _sealed_memory() -> str:
    import fcntl

    descriptor = os.memfd_create("pipecomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(descriptor)
    return "memfd with seals: shared memory that vanishes with its last owner"


def _futex() -> str:
    number = _SYS_FUTEX.get(platform.machine())
    if number is None:
        raise _MissingPartError(f"not known how to call it on {platform.machine()}")
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, ctypes.byref(word), _FUTEX_WAKE_PRIVATE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "waiting ranks sleep instead of spinning"


def _sockets() -> str:
    name = f"\0pipecomm-doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen(1)
        client.connect(name)
        peer, _ = server.accept()
        with peer:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(credentials[4:8], sys.byteorder)
    return f"abstract AF_UNIX, which knows the peer's user ({uid}) and notices its death"


def _same_host() -> str:
    """Connects two ranks of this process, which takes all that two processes would need."""
    core = _core()
    listeners = [core.Listener(), core.Listener()]
    addresses = [listener.address for listener in listeners]

    def connect(rank: int) -> Any:
        return listeners[rank].connect(rank, addresses, name="doctor", timeout_s=_TRY_TIMEOUT_S)

    with ThreadPoolExecutor(len(listeners)) as pool:
        communicators = list(pool.map(connect, range(len(listeners))))
    for communicator in communicators:
        communicator.close()
    return (
        "memfd ring over AF_UNIX, tried here; peers must share this kernel, network namespace "
        f"and user ({os.geteuid()})"
    )


def _other_host() -> str:
    from pipecomm._native import core
    from pipecomm.errors import ConfigError
    from pipecomm.links.interfaces import choose_address

    listener = core.Listener()
    try:
        listener.listen_tcp(choose_address(allow_loopback=False))
    except ConfigError as error:
        raise _MissingPartError(str(error)) from error
    return f"TCP; ranks elsewhere would call {listener.address.split('|')[5]} (another port)"


_PARTS: dict[str, Callable[[], str]] = {
    "pipecomm": _package,
    "Python": _python,
    "machine": _machine,
    "extension": _extension,
    "torch": _torch,
    "torch half": _torch_half,
    "backend": _backend,
    "codecs": _codecs,
    "CUDA parts": _cuda,
    "CUDA driver": _cuda_driver,
    "nvcc": _nvcc,
    "C++ compiler": _compiler,
    "shared memory": _sealed_memory,
    "futex": _futex,
    "sockets": _sockets,
    "path to peers on this host": _same_host,
    "path to peers on other hosts": _other_host,
}
