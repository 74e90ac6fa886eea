"""The doctor: tells what is there, and why not, also where much is missing or broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomm.app import doctor
from pipecomm.app.doctor import examine, format_findings
from tests.patience import patient

PACKAGE = Path(doctor.__file__).resolve().parent.parent
EXTENSION_PARTS = {"extension", "codecs", "torch half", "backend", "path to peers on this host"}
# An editable install would give the copy its extension.
DOCTOR_OF_THE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
from pipecomm.app.cli import main
sys.exit(main(["doctor", "--json"]))
"""


def states(findings: list[dict[str, str]]) -> dict[str, str]:
    return {finding["part"]: finding["state"] for finding in findings}


def text_of(findings: list[dict[str, str]], part: str) -> str:
    return next(finding["text"] for finding in findings if finding["part"] == part)


def use_native(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    monkeypatch.setitem(sys.modules, "pipecomm._native", SimpleNamespace(**attributes))


def test_here_all_that_the_tests_need_is_found() -> None:
    found = states(examine())
    may_be_missing = {"nvcc", "CUDA parts", "CUDA driver", "torch half"}
    may_be_missing |= {"path to peers on other hosts"}
    assert {part for part, state in found.items() if state == "broken"} == set()
    assert {part for part, state in found.items() if state == "missing"} <= may_be_missing


@pytest.mark.parametrize(
    ("compiler", "state"),
    [
        ("env g++", "ok"),
        ("env g++ -m64", "ok"),
        ("env g++-of-nowhere", "missing"),
        ("'g++", "missing"),
        ("-m64", "missing"),
    ],
)
def test_compiler_may_have_a_cache_before_it_and_options_behind(
    compiler: str, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in ("env", "g++"):
        (tmp_path / program).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    assert states(examine())["C++ compiler"] == state


def test_findings_name_what_was_built_and_found() -> None:
    import torch

    from pipecomm._native import core

    findings = examine()
    assert torch.__version__ in text_of(findings, "torch")
    assert core.build_info()["compiler"] in text_of(findings, "extension")
    assert "memfd ring" in text_of(findings, "path to peers on this host")


def test_address_for_other_hosts_is_one_that_can_be_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_SOCKET_IFNAME", "lo")
    text = text_of(examine(), "path to peers on other hosts")
    assert "127.0.0.1:" in text or "[::1]:" in text


def test_interface_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_SOCKET_IFNAME", "nosuch0")
    findings = examine()
    assert states(findings)["path to peers on other hosts"] == "missing"
    assert "'nosuch0'" in text_of(findings, "path to peers on other hosts")


def test_missing_extension_is_told_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_native(monkeypatch, problem="no built extension; run pip")
    monkeypatch.setattr(doctor, "_PACKAGE", tmp_path)
    findings = examine()
    found = states(findings)
    assert {found[part] for part in EXTENSION_PARTS} == {"missing"}
    assert text_of(findings, "extension") == "no built extension; run pip"
    assert found["torch"] == "ok"


def test_broken_extension_is_broken_and_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_native(monkeypatch, problem="undefined symbol: f")
    (tmp_path / "_core.so").touch()
    monkeypatch.setattr(doctor, "_PACKAGE", tmp_path)
    findings = examine()
    assert states(findings)["extension"] == "broken"
    assert "undefined symbol: f" in text_of(findings, "extension")


def test_missing_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    findings = examine()
    assert states(findings)["torch"] == "missing"
    assert "pip install torch" in text_of(findings, "torch")


@pytest.mark.parametrize(
    "error", [ImportError("libtorch.so: bad\n  ELF"), OSError("no"), SystemExit(3), RuntimeError()]
)
def test_broken_torch_is_told(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(name: str) -> Any:
        if name == "torch":
            raise error
        return original(name)

    original = doctor.importlib.import_module
    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    findings = examine()
    assert states(findings)["torch"] == "broken"
    assert type(error).__name__ in text_of(findings, "torch")
    assert "\n" not in text_of(findings, "torch")


def test_another_torch_than_built_for_is_told_with_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "_c10d-1.2.3-abc.so").touch()
    monkeypatch.setattr(doctor, "_PACKAGE", tmp_path)
    finding = text_of(examine(), "torch half")
    assert "built for 1.2.3" in finding
    assert "running torch 2." in finding


def test_machine_without_tools_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: None)
    found = states(examine())
    assert (found["nvcc"], found["C++ compiler"]) == ("missing", "missing")


@pytest.mark.parametrize(
    ("part", "owner", "function"),
    [("shared memory", os, "memfd_create"), ("sockets", doctor.socket, "socket")],
)
def test_kernel_without_a_feature_is_told(
    monkeypatch: pytest.MonkeyPatch, part: str, owner: Any, function: str
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(owner, function, refuse)
    findings = examine()
    assert states(findings)[part] == "broken"
    assert "not implemented" in text_of(findings, part)


def use_driver(monkeypatch: pytest.MonkeyPatch, version: int, nvcc: str, status: int = 0) -> None:
    """A driver for CUDA `version` (12040: 12.4), and an extension of that nvcc."""

    def get_version(address: Any) -> int:
        address._obj.value = version
        return status

    library = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr(doctor, "_driver_library", lambda: library)
    built = {"cuda": bool(nvcc), "nvcc": nvcc, "cuda_archs": "80-real,90"}
    use_native(monkeypatch, problem=None, core=SimpleNamespace(build_info=lambda: built))


@pytest.mark.parametrize(
    ("version", "nvcc", "state", "texts"),
    [
        (
            12040,
            "13.0.88",
            "broken",
            ["CUDA 13.0 or newer", "nvcc 13.0.88", "got one for CUDA 12.4"],
        ),
        (12040, "12.8.61", "ok", ["for CUDA 12.4, older than nvcc 12.8.61", "architectures above"]),
        (13000, "13.0.88", "ok", ["for CUDA 13.0; pipecomm was built with nvcc 13.0.88"]),
        (13010, "12.6.20", "ok", ["for CUDA 13.1; pipecomm was built with nvcc 12.6.20"]),
        (12080, "", "ok", ["for CUDA 12.8; pipecomm was built without CUDA"]),
    ],
)
def test_driver_is_told_beside_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, version: int, nvcc: str, state: str, texts: list[str]
) -> None:
    use_driver(monkeypatch, version, nvcc)
    findings = examine()
    assert states(findings)["CUDA driver"] == state
    for text in texts:
        assert text in text_of(findings, "CUDA driver")


def test_driver_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, 12040, "12.4.1", status=999)
    findings = examine()
    assert states(findings)["CUDA driver"] == "broken"
    assert "CUresult 999" in text_of(findings, "CUDA driver")


def test_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None, **options: Any) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", refuse)
    findings = examine()
    assert states(findings)["CUDA driver"] == "missing"
    assert "libcuda.so.1: cannot open" in text_of(findings, "CUDA driver")


def test_failed_try_of_the_path_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise ConnectionError("no socket")

    use_native(monkeypatch, problem=None, core=SimpleNamespace(Listener=refuse))
    findings = examine()
    assert states(findings)["path to peers on this host"] == "broken"
    assert "no socket" in text_of(findings, "path to peers on this host")


def test_text_has_a_line_per_part() -> None:
    findings = [
        {"part": "a", "state": "ok", "text": "fine"},
        {"part": "longer", "state": "missing", "text": "why"},
    ]
    assert format_findings(findings) == "a       ok       fine\nlonger  missing  why"


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_command_ends_with_zero_and_one_document_without_the_extension(
    tmp_path: Path, damage: str
) -> None:
    """The real thing: a copy of the package whose extension is not there or is garbage."""
    copy = tmp_path / "pipecomm"
    for path in PACKAGE.rglob("*.py"):
        target = copy / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    # torch loads it by the installed package's entry point.
    autoload = PACKAGE.parent / "pipecomm_autoload.py"
    (tmp_path / autoload.name).write_bytes(autoload.read_bytes())
    if damage == "broken":
        from pipecomm import _core

        (copy / Path(_core.__file__).name).write_bytes(b"not an extension")
    ended = subprocess.run(
        [sys.executable, "-c", DOCTOR_OF_THE_COPY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
    )
    assert ended.returncode == 0
    findings = json.loads(ended.stdout)
    assert states(findings)["extension"] == damage
    assert states(findings)["torch"] == "ok"
