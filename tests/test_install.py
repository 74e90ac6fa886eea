"""Installs pipecomm in every supported way: sdist, wheel, editable, torch half at first use.

Needs no network. One core is compiled, with little optimization and under flags that would change
what it computes, in a folder whose name has a
space and an accented letter; the other installations reuse its objects.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import mounts
from tests.patience import patient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("pip", "setuptools", "_distutils_hack", "packaging", "cmake", "ninja", "pybind11")
FAST = "-ffast-math -funsafe-math-optimizations -ffinite-math-only -fno-signed-zeros"
BUILD_ENV = {
    "PIPECOMM_CUDA": "off",
    "CMAKE_BUILD_TYPE": "None",  # with no flags of its own
    "CXXFLAGS": f"-O1 {FAST} -ffp-contract=fast",
    "LDFLAGS": f"-Ofast {FAST}",
}
if platform.machine() == "x86_64":
    BUILD_ENV["CXXFLAGS"] += " -mfpmath=387"


@dataclass(frozen=True)
class Workshop:
    """Where the installations happen."""

    folder: Path  # its name has a space and an accented letter
    tools: Path  # the running Python's build tools, and nothing else
    everything: Path  # the running Python's packages without pipecomm

    def make_venv(self, name: str) -> Path:
        """A virtual environment that sees the build tools only; gives its python."""
        folder = self.folder / name
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        site_packages = next(folder.glob("lib/python*/site-packages"))
        (site_packages / "tools.pth").write_text(f"{self.tools}\n")
        return folder / "bin" / "python"


def run(
    command: list[str | Path], *, cwd: Path | None = None, ok: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    names = ("PYTHONPATH", "PIPECOMM_WERROR", "TORCH_CUDA_ARCH_LIST")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=patient(300)
    )
    assert (done.returncode == 0) == ok, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def pip_install(python: Path, *words: str | Path) -> None:
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-q"]
    run([python, "-m", "pip", "install", *options, *words], **BUILD_ENV)


def link_packages(target: Path, *, only: tuple[str, ...] | None) -> Path:
    target.mkdir()
    for folder in {sysconfig.get_paths()[key] for key in ("purelib", "platlib")} | set(sys.path):
        if Path(folder).name not in ("site-packages", "dist-packages"):
            continue
        for entry in Path(folder).iterdir():
            wanted = entry.name.startswith(only) if only else "pipecomm" not in entry.name
            if wanted and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return target


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("install") / "a pläce"
    folder.mkdir()
    tools = link_packages(folder / "tools", only=BUILD_TOOLS)
    return Workshop(folder, tools, link_packages(folder / "everything", only=None))


@pytest.fixture(scope="module")
def sources(workshop: Workshop) -> Path:
    """The source package, unpacked away from the checkout."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", workshop.folder]
    run([*command, "sdist", "--dist-dir", workshop.folder], cwd=ROOT)
    (archive,) = workshop.folder.glob("pipecomm-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(workshop.folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def builder(workshop: Workshop) -> Path:
    return workshop.make_venv("builder")


@pytest.fixture(scope="module")
def wheel(workshop: Workshop, sources: Path, builder: Path) -> Path:
    """Built where no torch is installed."""
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-q"]
    run([builder, "-m", "pip", "wheel", *options, "-w", workshop.folder, sources], **BUILD_ENV)
    (path,) = workshop.folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(workshop: Workshop, wheel: Path) -> Path:
    """Python of an environment with the wheel."""
    python = workshop.make_venv("installed")
    pip_install(python, wheel)
    return python


def test_sdist_holds_every_source_and_the_licence(sources: Path) -> None:
    for folder in ("csrc", "cmake", "pipecomm", "tests"):
        for path in (ROOT / folder).rglob("*"):
            is_source = path.suffix in (".h", ".cuh", ".cu", ".cpp", ".py", ".cmake", ".txt")
            if is_source and "build" not in path.relative_to(ROOT).parts:
                assert (sources / path.relative_to(ROOT)).is_file(), path
    for name in ("CMakeLists.txt", "pyproject.toml", "setup.py", "LICENSE", "README.md"):
        assert (sources / name).is_file(), name
    assert "Apache License" in (sources / "LICENSE").read_text()


def test_sdist_holds_nothing_that_was_built(sources: Path) -> None:
    assert [path for path in sources.rglob("*") if path.suffix in (".so", ".pyc", ".o")] == []


def test_wheel_is_tagged_for_this_machine_only_and_holds_what_first_use_needs(wheel: Path) -> None:
    assert re.search(r"-cp3\d+-cp3\d+-linux_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pipecomm/py.typed", "pipecomm/_core.pyi"} <= {*names}
    for path in (ROOT / "csrc").rglob("*.h"):
        assert f"pipecomm/_src/csrc/{path.relative_to(ROOT / 'csrc').as_posix()}" in names
    assert "pipecomm/_src/csrc/torch/_c10d.cpp" in names
    assert "pipecomm/libpipecomm.so" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert [name for name in names if name.startswith(("tests/", "pipecomm/_c10d-"))] == []


# 1e-310 is subnormal: 0 where a library that was loaded has switched those off.
LOAD = (
    "from pipecomm.torch_half import c10d_build; print(c10d_build.load(torch).__file__); "
    "assert float('1e-310') * 1.0 > 0.0"
)
IMPORT_ORDERS = {
    "pipecomm first": f"import pipecomm, torch; {LOAD}",
    "torch first": f"import torch, pipecomm; {LOAD}",
    "in a thread": f"""
import threading
def work():
    import pipecomm, torch; {LOAD}
thread = threading.Thread(target=work); thread.start(); thread.join()""",
    "in a forked child": f"""
import os, sys
child = os.fork()
if child == 0:
    import pipecomm, torch; {LOAD}; sys.stdout.flush(); os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))""",
}


def test_torch_half_is_built_once_at_the_first_use_by_several_processes(
    workshop: Workshop, installed: Path
) -> None:
    cache = workshop.folder / "first use"
    env = {
        **os.environ,
        "PYTHONPATH": str(workshop.everything),
        "XDG_CACHE_HOME": str(cache),
        "CUDA_HOME": "/nonexistent",
        "CXX": f"{os.environ.get('CXX') or 'c++'} -Ofast {FAST}",
    }
    ranks = [
        subprocess.Popen(
            [installed, "-W", "error::RuntimeWarning", "-c", code],
            cwd=workshop.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code in IMPORT_ORDERS.values()
    ]
    outputs = [rank.communicate(timeout=patient(300)) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    assert sum(error.count("building the torch half") for _, error in outputs) == 1
    (built,) = (cache / "pipecomm").glob("*.so")
    assert {output.strip() for output, _ in outputs} == {str(built)}
    # From now on no compiler is needed.
    again = run(
        [installed, "-c", IMPORT_ORDERS["torch first"]],
        cwd=workshop.folder,
        **{**env, "CXX": "/bin/false"},
    )
    assert again.stdout.strip() == str(built)


def test_flags_for_fast_mathematics_change_no_byte_of_a_codec_and_leave_subnormals_alive(
    workshop: Workshop, installed: Path
) -> None:
    # Appended: the installed package comes before the one of the checkout.
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=append", "--rootdir", ROOT]
    options += [
        "-k",
        "golden or of_the_reference or non_finite",
        ROOT / "tests" / "codecs" / "test_codec.py",
    ]
    alive = (
        "import sys, pytest, pipecomm._core; assert float('1e-310') * 1.0 > 0.0\n"
        "assert pipecomm.__file__.startswith(sys.prefix); sys.exit(pytest.main(sys.argv[1:]))"
    )
    env = {"PYTHONPATH": str(workshop.everything)}
    run([installed, "-c", alive, *options], cwd=workshop.folder, **env)


@pytest.mark.skipif(bool(mounts.why_impossible()), reason=mounts.why_impossible())
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["wheel"], r"CXX=/bin/false does not compile"),
        (["install", "-e"], r"an editable installation writes into .* install without -e"),
    ],
)
def test_checkout_that_cannot_be_written_is_built_elsewhere_or_the_way_out_is_named(
    workshop: Workshop,
    sources: Path,
    builder: Path,
    tmp_path: Path,
    words: list[str],
    expected: str,
) -> None:
    copy = shutil.copytree(sources, tmp_path / "copy", ignore=shutil.ignore_patterns("build"))
    pip = [*mounts.in_read_only(copy), builder, "-m", "pip", words[0], "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", *words[1:], copy]
    done = run(command, cwd=tmp_path, ok=False, **{**BUILD_ENV, "CXX": "/bin/false"})
    text = done.stdout + done.stderr
    assert re.search(expected, text)
    assert "cannot be written; building in" in text
    assert "Permission denied" not in text
    assert "Read-only" not in text


def test_command_line_started_in_the_source_folder_uses_the_installed_package(
    workshop: Workshop, sources: Path, installed: Path
) -> None:
    env = {"PYTHONPATH": str(workshop.everything)}
    done = run([installed.with_name("pipecomm"), "--help"], cwd=sources, **env)
    assert "doctor" in done.stdout
    assert "RuntimeWarning" not in done.stderr


def describe(workshop: Workshop, python: Path) -> str:
    code = (
        "import pipecomm, pipecomm.errors as errors; from pipecomm._native import core\n"
        "print(core.build_info()['compiler'].split()[0], getattr(errors, 'ADDED', '-'))"
    )
    env = {"PYTHONPATH": str(workshop.everything)}
    return run([python, "-c", code], cwd=workshop.folder, **env).stdout.strip()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_editable_install_shows_changes_and_gives_way_to_a_normal_one(
    workshop: Workshop, sources: Path, builder: Path, wheel: Path
) -> None:
    pip_install(builder, "-e", sources)
    compiler, added = describe(workshop, builder).split()
    assert added == "-"
    replace(sources / "csrc/bindings/build_info.cpp", f'"{compiler} ', '"changed ')
    replace(sources / "pipecomm/errors.py", "__all__ = [", "ADDED = 'added'\n__all__ = [")
    assert describe(workshop, builder) == f"{compiler} added"
    pip_install(builder, "-e", sources)
    assert describe(workshop, builder) == "changed added"
    pip_install(builder, "--force-reinstall", wheel)
    assert describe(workshop, builder) == f"{compiler} -"
    run([builder, "-m", "pip", "uninstall", "-y", "-q", "pipecomm"])
    site_packages = next(builder.parent.parent.glob("lib/python*/site-packages"))
    assert list(site_packages.glob("*pipecomm*")) == []


def build_that_fails(sources: Path, folder: Path, **env: str) -> str:
    """What a build that must stop prints on stderr."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder]
    done = run(command, cwd=sources, ok=False, **env)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CXX", "/bin/false"),
        ("PIPECOMM_CUDA", "maybe"),
        ("TORCH_CUDA_ARCH_LIST", "abc"),
        ("MAX_JOBS", "none"),
    ],
)
def test_build_with_an_unusable_setting_stops_with_one_line_that_names_it(
    sources: Path, tmp_path: Path, name: str, value: str
) -> None:
    (line,) = build_that_fails(sources, tmp_path, **{name: value}).strip().splitlines()
    assert line.startswith("pipecomm: ")
    assert name in line
    assert value in line


def configure(sources: Path, folder: Path, mode: str, **env: str) -> str:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    options = [f"-DPIPECOMM_CUDA={mode}", "-DPIPECOMM_BUILD_PYTHON=OFF"]
    done = run([cmake, "-S", sources, "-B", folder, *options], ok=mode != "on", **env)
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_cuda_with_an_nvcc_that_is_not_there_is_left_out_or_refused(
    sources: Path, tmp_path: Path, mode: str
) -> None:
    text = configure(sources, tmp_path, mode, CUDACXX="/nonexistent/nvcc")
    assert "/nonexistent/nvcc" in text
    assert ("CUDA kernels OFF" in text) == (mode == "auto")
    assert ("Install the CUDA toolkit, or use PIPECOMM_CUDA=auto" in text) == (mode == "on")


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_cuda_with_a_toolkit_older_than_12_5_is_left_out_or_refused_with_its_version(
    sources: Path, tmp_path: Path, mode: str
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.4, V12.4.131"\n')
    nvcc.chmod(0o755)
    text = configure(sources, tmp_path / "build", mode, CUDACXX=str(nvcc))
    assert "older than 12.5: V12.4.131" in text
    assert ("CUDA kernels OFF" in text) == (mode == "auto")
    assert ("cannot be built" in text) == (mode == "on")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to refuse a host compiler")
def test_cuda_with_a_host_compiler_too_new_for_nvcc_names_both_and_the_setting(
    sources: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++-99"
    compiler.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=99 "$@"\n')
    compiler.chmod(0o755)
    text = configure(sources, tmp_path / "build", "auto", CUDAHOSTCXX=str(compiler))
    assert re.search(
        r"CUDA kernels OFF .*nvcc V\d+\.\d+\.\d+ .*g\+\+-99 \d+\.\d+.*CUDAHOSTCXX", text
    )
