"""Started without a launcher, or with half an environment: one error names everything, at once."""

from __future__ import annotations

import re
import time

import pytest
import torch.distributed as dist

import pipecomm  # noqa: F401 - has init_process_group check first
from pipecomm.env_rendezvous import check_environment
from pipecomm.errors import ConfigError

_GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _set(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    for name, value in {**_GOOD, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"MASTER_ADDR": None}, ["no MASTER_ADDR"]),
        (dict.fromkeys(_GOOD), ["no RANK", "no WORLD_SIZE", "no MASTER_ADDR", "no MASTER_PORT"]),
        ({"RANK": "5"}, ["RANK=5 is not below WORLD_SIZE=2"]),
        ({"RANK": "-1"}, ["RANK=-1 is not below WORLD_SIZE=2"]),
        ({"RANK": ""}, ["no RANK"]),
        ({"MASTER_PORT": "abc"}, ["MASTER_PORT='abc' is no number"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is no port"]),
        (
            {"WORLD_SIZE": "two", "MASTER_PORT": None},
            ["WORLD_SIZE='two' is no number", "no MASTER_PORT"],
        ),
    ],
)
def test_all_that_is_wrong_is_named_at_once(
    changed: dict[str, str | None], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, **changed)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"torchrun.*RANK=0 WORLD_SIZE=1") as caught:
        dist.init_process_group("pipecomm")
    assert time.monotonic() - start < 5
    named = re.search(r"got: (.*?);", str(caught.value))
    assert named is not None
    assert named[1].split(", ") == texts


def test_error_is_a_value_error_as_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, MASTER_PORT=None)
    with pytest.raises(ValueError, match="MASTER_PORT"):
        dist.init_process_group("gloo")


def test_rank_and_size_may_come_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=None, WORLD_SIZE="one")
    check_environment("env://?rank=0&world_size=1")
    with pytest.raises(ConfigError, match="got: RANK=3 is not below WORLD_SIZE=1;"):
        check_environment("env://?rank=3&world_size=1")


def test_single_rank_starts_as_the_text_says(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE="1", MASTER_PORT="0")
    dist.init_process_group("pipecomm")
    dist.barrier()
    dist.destroy_process_group()
