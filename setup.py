"""Builds pipecomm: CMake for the core, one compiler call for the torch half.

Settings, all from the environment: PIPECOMM_CUDA (auto, on, off), PIPECOMM_CUDA_ARCHS or
TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), MAX_JOBS, CXX, PIPECOMM_WERROR (1 makes warnings errors).
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
EXAMPLE_ARCHS = "8.0;9.0+PTX"
GIB_PER_JOB = 2


def stop(text: str) -> NoReturn:
    raise SystemExit(f"pipecomm: {text}")


def find_build_folder() -> Path:
    """build/; in a checkout that this user cannot write, a folder that ends with this process."""
    written = (ROOT, ROOT / "build", ROOT / "pipecomm.egg-info")
    if all(os.access(path, os.W_OK) for path in written if path.exists()):
        return ROOT / "build"
    folder = Path(tempfile.mkdtemp(prefix="pipecomm-build-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    print(f"pipecomm: {ROOT} cannot be written; building in {folder}")
    return folder


def load_c10d_compile() -> Any:
    """pipecomm/torch_half/c10d_compile.py, without importing the package that is not built yet."""
    path = ROOT / "pipecomm" / "torch_half" / "c10d_compile.py"
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module


def find_tool(name: str) -> str | None:
    """The program of the pip package of that name, else the one on PATH."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return shutil.which(name)
    folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", "")
    return shutil.which(name, path=str(folder)) or shutil.which(name)


def memory_limits(root: Path = Path("/")) -> list[int]:
    """Limits in bytes, v1's and v2's, of this process's control group and of those above it."""
    cgroup, mounts = root / "proc/self/cgroup", root / "proc/self/mountinfo"
    if not cgroup.is_file() or not mounts.is_file():
        return []
    lines = [line.split(":", 2) for line in cgroup.read_text().splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    limits = []
    for line in mounts.read_text().splitlines():
        *_, mounted, mount, _ = line.split(" - ")[0].split(maxsplit=5)
        kind, *options = line.split(" - ")[1].split()
        is_v1 = kind == "cgroup" and "memory" in options[-1].split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        path = Path(paths.get("memory" if is_v1 else "", "/"))
        below = path.relative_to(mounted) if path.is_relative_to(mounted) else Path()
        for folder in (below, *below.parents):
            name = "memory.limit_in_bytes" if is_v1 else "memory.max"
            file = root / mount.lstrip("/") / folder / name
            text = file.read_text().strip() if file.is_file() else "max"
            limits += [int(text)] if text.isdigit() else []
    return limits


def memory_gib() -> float:
    """Memory this build may use: the machine's, or the container's limit if that is less."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *memory_limits()) / 2**30


def num_jobs() -> int:
    """MAX_JOBS, else what processors and memory allow."""
    text = os.environ.get("MAX_JOBS", "")
    if not text:
        return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib() / GIB_PER_JOB)))
    if not text.isdigit() or int(text) == 0:
        stop(f"MAX_JOBS is a number of compile jobs, 1 or more; got {text!r}.")
    return int(text)


def cuda_mode() -> str:
    mode = os.environ.get("PIPECOMM_CUDA") or "auto"
    if mode not in ("auto", "on", "off"):
        stop(f"PIPECOMM_CUDA is auto, on or off; got {mode!r}.")
    return mode


def cuda_archs() -> str:
    """The architectures in CMake's words: "8.0;9.0+PTX" becomes "80-real;90"; "": the default."""
    names = ("PIPECOMM_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")
    name = next((n for n in names if os.environ.get(n, "").strip()), None)
    if name is None:
        return ""
    text, archs = os.environ[name], []
    for word in re.split(r"[;, ]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if match is None:
            stop(f"{name} lists compute capabilities such as '{EXAMPLE_ARCHS}'; got {word!r}.")
        if int(match[1]) < 8:
            print(f"pipecomm: {word} of {name} is left out; the kernels need 8.0 or newer")
            continue
        archs.append(f"{match[1]}{match[2]}{match[3]}{'' if match[4] else '-real'}")
    return ";".join(archs) or stop(f"{name}={text!r} names no architecture of 8.0 or newer.")


def find_torch() -> Path | None:
    """Folder of the target environment's torch, which build isolation hides from import."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    folders = (Path(sysconfig.get_paths()[key]) / "torch" for key in ("purelib", "platlib"))
    return next((f for f in folders if (f / "version.py").is_file()), None)


def configure_command(cmake: str, compiler: list[str], folder: Path) -> list[str]:
    command = [
        *(cmake, f"-S{ROOT}", f"-B{folder}"),
        f"-DCMAKE_CXX_COMPILER={';'.join(compiler)}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPIPECOMM_CUDA={cuda_mode()}",
        f"-DPIPECOMM_CUDA_ARCHS={cuda_archs()}",
        f"-DPIPECOMM_WERROR={os.environ.get('PIPECOMM_WERROR') or '0'}",
    ]
    ninja = find_tool("ninja")
    if ninja is None:
        print("pipecomm: ninja was not found; building with make")
        return [*command, "-GUnix Makefiles"]
    return [*command, "-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]


class BuildExt(build_ext):
    """Builds everything in the build folder, then installs it into the package folder."""

    build_folder = ROOT / "build"

    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode and not self.is_in_place():
            stop(
                f"an editable installation writes into {ROOT}, which this user cannot: "
                "install without -e, or from a copy of your own."
            )
        self.jobs = num_jobs()
        needed = "the build needs cmake >= 3.24: pip install cmake ninja pybind11"
        self.cmake = find_tool("cmake") or stop(f"{needed} (or leave out --no-build-isolation).")
        c10d = load_c10d_compile()
        try:
            compiler = c10d.find_compiler(os.environ)
        except c10d.CompileError as error:
            stop(str(error))
        self.configure(compiler)
        self.make("pipecomm")
        # Both need the library only, and each has one large file.
        with ThreadPoolExecutor(max_workers=1) as beside:
            torch_half = beside.submit(self.build_torch_half, c10d)
            if self.jobs == 1:
                torch_half.result()
            self.make("all", num_jobs=max(1, self.jobs - 1))
        self.torch_half = torch_half.result()
        package = Path(self.get_ext_fullpath(ext.name)).parent
        self.install_runtime(package)
        self.install_component(package, "sources")

    @classmethod
    def is_in_place(cls) -> bool:
        return cls.build_folder.is_relative_to(ROOT)

    def copy_extensions_to_source(self) -> None:  # called for an editable installation
        self.install_runtime(ROOT / "pipecomm")

    def configure(self, compiler: list[str]) -> None:
        """Prepare a build, in a folder of its own for what CMake cannot change later."""
        names = ("PIPECOMM_CUDA", "CXXFLAGS", "CUDACXX", "LDFLAGS")
        settings = [sys.executable, str(find_tool("ninja") is None), *compiler]
        settings += [str(ROOT), *(os.environ.get(name, "") for name in names)]
        key = hashlib.sha256("\0".join(settings).encode()).hexdigest()[:8]
        self.folder = self.build_folder / f"cmake-{key}"
        self.call(configure_command(self.cmake, compiler, self.folder))

    def make(self, target: str, num_jobs: int | None = None) -> None:
        options = ["--target", target, f"-j{num_jobs or self.jobs}"]
        self.call([self.cmake, "--build", str(self.folder), *options])

    def build_torch_half(self, c10d: Any) -> Path | None:
        """The compiled torch half, or None where it is left to the first use."""
        torch_folder = find_torch()
        if torch_folder is None:
            print("pipecomm: no torch here yet; the torch half is built at first use")
            return None
        csrc, werror = ROOT / "csrc", os.environ.get("PIPECOMM_WERROR") == "1"
        output = self.folder / str(c10d.module_name(csrc, torch_folder))
        try:
            if not output.exists():
                c10d.compile_module(
                    csrc, torch_folder, self.folder, os.environ, output, werror=werror
                )
        except c10d.CompileError as error:
            if werror:
                stop(str(error))
            print(f"pipecomm: {error}\npipecomm: the torch half is tried again at first use")
            return None
        print(f"pipecomm: torch half built for torch {c10d.torch_version(torch_folder)}")
        return output

    def install_component(self, package: Path, component: str) -> None:
        command = [self.cmake, "--install", str(self.folder), "--prefix", str(package)]
        self.call([*command, "--component", component])

    def install_runtime(self, package: Path) -> None:
        for old in package.glob("*.so"):
            old.unlink()  # and not overwritten: a running process may have mapped it
        self.install_component(package, "runtime")
        if self.torch_half is not None:
            shutil.copy2(self.torch_half, package)

    def call(self, command: list[str]) -> None:
        code = subprocess.run(command, cwd=ROOT).returncode
        if code != 0:
            memory = f"If a compiler was killed, memory ran out: use MAX_JOBS=1 (now {self.jobs})."
            stop(f"the build stopped (exit {code}); the first error is above. {memory}")


class BuildPy(build_py):
    """Starts from an empty folder, so that no file of an earlier build gets into a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "pipecomm", ignore_errors=True)
        super().run()


class EditableWheel(editable_wheel):
    """Puts a copy of what torch calls beside the metadata that names it: `import torch` must work
    also where the metadata is on the path of an interpreter that does not run the .pth file.
    """

    def _run_build_commands(self, dist_name: str, unpacked_wheel: Any, *rest: Any) -> Any:
        shutil.copy2(ROOT / "pipecomm_autoload.py", unpacked_wheel)
        return super()._run_build_commands(dist_name, unpacked_wheel, *rest)


if __name__ == "__main__":
    BuildExt.build_folder = find_build_folder()
    base = str(BuildExt.build_folder)
    elsewhere = {"build": {"build_base": base}, "egg_info": {"egg_base": base}}
    setup(
        options={} if BuildExt.is_in_place() else elsewhere,
        ext_modules=[Extension("pipecomm._core", sources=[])],
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "editable_wheel": EditableWheel},
    )
