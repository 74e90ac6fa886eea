"""Modules of the package that only give what is in its rooms another name, and the version."""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import sys

import pytest

from pipecomm._version import __version__

# Public name -> where its contents live.
DOORS = {
    "pipecomm.arrays": "pipecomm.codecs.arrays",
    "pipecomm.codec_ops": "pipecomm.codecs.ops",
    "pipecomm.deepspeed_p2p": "pipecomm.drop_in.deepspeed",
    "pipecomm.megatron": "pipecomm.drop_in.megatron",
    "pipecomm.metrics": "pipecomm.app.metrics",
    "pipecomm.timeline": "pipecomm.engine.timeline",
}


@pytest.mark.parametrize("door", DOORS)
def test_door_has_all_that_is_public_in_the_room(door: str) -> None:
    opened, room = importlib.import_module(door), importlib.import_module(DOORS[door])
    assert {*opened.__all__} == {*room.__all__}
    for name in opened.__all__:
        assert getattr(opened, name) is getattr(room, name)


def test_module_can_be_run_as_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipecomm", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("pipecomm", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pipecomm {__version__}\n"


def test_version_is_that_of_the_installation() -> None:
    assert importlib.metadata.version("pipecomm") == __version__
