"""The typed stub of the core says what the built module has, no more and no less."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecomm import _core
from tests.stub import differences, of_module, of_stub

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "pipecomm" / "_core.pyi"
CUDA_ONLY = {"codec_encode_cuda", "codec_decode_cuda"}


def test_stub_and_module_agree() -> None:
    stub = of_stub(STUB)
    if not _core.build_info()["cuda"]:
        stub = {name: text for name, text in stub.items() if name not in CUDA_ONLY}
    assert differences(stub, of_module(_core)) == []


def test_every_parameter_of_the_module_has_a_name() -> None:
    unnamed = {name: text for name, text in of_module(_core).items() if "arg0" in text}
    assert unnamed == {}


def test_comparison_sees_the_module() -> None:
    found = of_module(_core)
    assert found["Pool.limit_nbytes"] == "property, can be set"
    assert found["Transfer.is_done"] == "property"
    assert found["Communicator.abort"] == "(self, epoch, text), 0 optional"
    assert found["hang_report"] == "(pid, timeout_s), 1 optional"
    assert found["Listener.connect"].startswith("(self, rank, addresses, *, name, timeout_s, ")
    assert len(found) > 50


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("def wait(self, timeout_s: float)", "def wait(self, seconds: float)"), "Transfer.wait: "),
        (("def trim(self) -> int: ...", ""), "Pool.trim: missing in the stub"),
        (("def codec_isa()", "def codec_set()"), "codec_set: (), 0 optional in the stub, missing"),
        (("max_inflight: int = 0", "max_inflight: int"), "Listener.connect: "),
        (("    @limit_nbytes.setter", "    @property"), "Pool.limit_nbytes: property in the stub"),
        (("class Device:", "class Devices:"), "Device: missing in the stub"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_comparison_finds_a_stub_that_differs(
    change: tuple[str, str], text: str, tmp_path: Path
) -> None:
    assert change[0] in STUB.read_text()
    changed = tmp_path / "changed.pyi"
    changed.write_text(STUB.read_text().replace(*change))
    found = differences(of_stub(changed), of_stub(STUB))
    assert any(line.startswith(text) for line in found)


def test_keys_of_build_info_are_those_of_the_stub() -> None:
    declared = STUB.read_text().split("class BuildInfo(TypedDict):\n")[1].split("\n\n")[0]
    assert [line.split(":")[0].strip() for line in declared.splitlines()] == [*_core.build_info()]
