"""Started without a launcher, or with half an environment: one error names everything, at once."""

from __future__ import annotations

import re
import time
from importlib import import_module

import pytest
import torch.distributed as dist

import pipecomm  # noqa: F401 - has init_process_group check first
from pipecomm.drop_in.env import check_environment, check_first
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


@pytest.mark.parametrize("backend", ["pipecomm", "cpu:gloo,cuda:pipecomm"])
def test_error_is_a_value_error_as_torchs_own(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, MASTER_PORT=None)
    with pytest.raises(ValueError, match="no MASTER_PORT; start the ranks with torchrun"):
        dist.init_process_group(backend)


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo"])
@pytest.mark.parametrize(
    "changed", [{"MASTER_PORT": None}, {"RANK": None, "WORLD_SIZE": None}, {"WORLD_SIZE": "two"}]
)
def test_other_backends_fail_as_without_us(
    backend: str | None, changed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, **changed)
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    with pytest.raises(ValueError, match=r".") as here:
        dist.init_process_group(backend)
    monkeypatch.setitem(handlers, "env", handlers["env"].__wrapped__)
    with pytest.raises(ValueError, match=r".") as torchs:
        dist.init_process_group(backend)
    assert type(here.value) is type(torchs.value)
    assert str(here.value) == str(torchs.value)


def test_rendezvous_that_asks_for_no_backend_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, MASTER_ADDR=None, MASTER_PORT=None)
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected"):
        next(dist.rendezvous("env://"))


def test_torch_that_has_no_such_handler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = import_module("torch.distributed.rendezvous")
    install = check_first.__wrapped__
    monkeypatch.setattr(torchs, "_rendezvous_handlers", {"tcp": print})
    install(lambda backend: True)
    assert torchs._rendezvous_handlers == {"tcp": print}
    monkeypatch.delattr(torchs, "_rendezvous_handlers")
    install(lambda backend: True)


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
