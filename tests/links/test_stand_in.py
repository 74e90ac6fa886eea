"""The device's side of the transport, in slots and streams, with the host as the device.

PIPECOMM_STAND_IN_DEVICE=1 makes tensors of the host cross as those of a GPU do. The rows here are
those of the host's own path: what holds there holds here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.errors import LinkTimeoutError, MessageMismatchError
from tests.drop_in import test_backend_life
from tests.links.test_link import Pair
from tests.patience import patient
from tests.ranks import run_ranks, spawn_ranks

_ENV = {"PIPECOMM_STAND_IN_DEVICE": "1"}
_ROOT = Path(__file__).resolve().parent.parent.parent
_CHECKS = "tests/device"
_REHEARSED = "two_ranks and host_and_device_meet"
# More than the slots of a link hold.
_LARGE = 12 << 20


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PIPECOMM_STAND_IN_DEVICE", "1")
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.tensor(2.5),
        torch.zeros(2, 0, 5),
        torch.tensor([True, False]),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.arange(_LARGE, dtype=torch.float32),
    ],
    ids=["float32", "scalar", "empty", "bool", "bfloat16", "special", "large"],
)
def test_tensor_arrives_bit_for_bit(pair: Pair, tensor: torch.Tensor) -> None:
    (got,) = pair.forward([tensor])
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("codec", ["int8", "int4", "int4:hadamard=64", "fp8", "nf4"])
def test_codec_gives_the_values_of_the_hosts_path(pair: Pair, codec: str) -> None:
    tensor = torch.randn(300, 771, generator=torch.Generator().manual_seed(0))
    made = Codec(codec)
    (got,) = pair.forward([tensor], made)
    assert torch.equal(got, made.decode(made.encode(tensor), torch.empty_like(tensor)))


def test_tensors_cross_in_slots_and_several_share_a_message(pair: Pair) -> None:
    tensors = [torch.ones(5), None, torch.arange(_LARGE // 4), torch.zeros(0)]
    got = pair.forward(tensors)
    assert got[1] is None
    for index in (0, 2, 3):
        assert torch.equal(got[index], tensors[index])
    assert pair.low._core.path(1) == "shared memory, in slots of host"


@pytest.mark.parametrize(
    ("sharing", "path"),
    [
        ("auto", "in slots of host"),
        ("descriptor", "in slots of host"),
        ("handle", "from host through the host"),  # the host has no IPC handles
        ("none", "from host through the host"),
    ],
)
def test_way_of_sharing_can_be_forced(
    monkeypatch: pytest.MonkeyPatch, sharing: str, path: str
) -> None:
    monkeypatch.setenv("PIPECOMM_STAND_IN_DEVICE", "1")
    monkeypatch.setenv("PIPECOMM_DEVICE_SHARING", sharing)
    pair = Pair()
    (got,) = pair.forward([torch.arange(_LARGE // 4)])
    assert torch.equal(got, torch.arange(_LARGE // 4))
    assert pair.low._core.path(1) == f"shared memory, {path}"
    pair.close()


def test_way_of_sharing_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_STAND_IN_DEVICE", "1")
    monkeypatch.setenv("PIPECOMM_DEVICE_SHARING", "magic")
    pair = Pair()
    with pytest.raises(Exception, match=r"none in PIPECOMM_DEVICE_SHARING; got 'magic'"):
        pair.forward([torch.ones(5)])
    pair.close()


def test_without_the_variable_they_do_not() -> None:
    pair = Pair()
    pair.forward([torch.ones(5)])
    assert pair.low._core.path(1) == "shared memory"
    pair.close()


def test_send_that_nobody_takes_times_out(pair: Pair) -> None:
    sent = pair.low.send(
        1, [torch.ones(_LARGE)], direction="forward", microbatch=0, codec=Codec("raw")
    )
    sent._timeout_s = 0.05
    with pytest.raises(LinkTimeoutError, match="rank 1 to take a message"):
        sent.wait()


def _mismatch(rank: int, size: int, store_path: str) -> None:
    test_backend_life.init(rank, size, store_path)
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.full((_LARGE,), 2.0), 1)
        return
    with pytest.raises(MessageMismatchError, match=r"float32 \[3\]"):
        dist.recv(torch.empty(4), 0)
    got = torch.empty(_LARGE)
    dist.recv(got, 0)
    assert bool((got == 2).all())


def test_mismatch_is_told_and_the_next_message_arrives() -> None:
    spawn_ranks(2, _mismatch, env=_ENV)


def test_killed_peer_fails_the_others_naming_it() -> None:
    outcomes = run_ranks(3, test_backend_life.killed_in_flight, env=_ENV)
    assert outcomes[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2):
        kind, value = outcomes[rank]
        assert kind == "ok", value
        assert "rank 1" in value[0]


def _dies_with_work_enqueued(rank: int, size: int, store_path: str) -> bool:
    """Rank 1 tells of slots that its streams never get to fill, and dies."""
    test_backend_life.init(rank, size, store_path)
    got = torch.zeros(1000)
    if rank == 0:
        dist.recv(got, 1)
        work = dist.irecv(torch.zeros(_LARGE), 1, tag=1)
        try:
            work.wait()
        except ConnectionError as error:
            return "rank 1" in str(error)
        return False
    dist.send(got, 0)
    dist.isend(torch.ones(_LARGE), 0, tag=1)
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def test_receive_of_what_a_dead_peer_had_told_of_is_an_error() -> None:
    for _ in range(3):
        outcomes = run_ranks(2, _dies_with_work_enqueued, env=_ENV)
        assert outcomes[0] == ("ok", True)


def test_messages_waited_for_arrive_after_the_sender_has_exited() -> None:
    assert spawn_ranks(2, test_backend_life.sender_exits, env=_ENV) == [True, True]


def test_checks_for_a_gpu_can_be_rehearsed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", _REHEARSED, _CHECKS],
        env={**os.environ, "PIPECOMM_CHECK_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=patient(120),
        cwd=_ROOT,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
