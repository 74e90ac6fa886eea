"""Ranks of Python, each a process, through the CUDA half over the stand-in driver.

`make test-fake-cuda` runs this, and with it the tests of the stand-in device, with the library of
tests/fake_cuda under Python; elsewhere nothing here is collected.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipecomm._native import core
from pipecomm.codecs.codec import Codec
from pipecomm.links.link import Links
from pipecomm.memory.pool import MemoryPool
from tests.links.test_link import Pair
from tests.ranks import spawn_ranks

_OUT_OF_MEMORY = 2
ENV = {"PIPECOMM_STAND_IN_DEVICE": "1"}
CODECS = ("raw", "int8", "int8:spikes=2", "int4", "int4:hadamard=64", "fp8", "nf4")
LIBRARY = Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]) / "libpipecomm.so"


def _pass_all(rank: int, size: int, store_path: str) -> str:
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=60.0, pool=MemoryPool())
    links.begin_step(1)
    given = torch.randn(300, 771, generator=torch.Generator().manual_seed(7))
    for number, name in enumerate(CODECS):
        codec = Codec(name)
        sent = links.send(1 - rank, [given], direction="forward", microbatch=number, codec=codec)
        (got,) = links.receive(1 - rank, direction="forward", microbatch=number).wait()
        assert got is not None
        expected = codec.decode(codec.encode(given), torch.empty_like(given)) if number else given
        assert torch.equal(got, expected), name
        sent.wait()
    path = links._core.path(1 - rank)
    links.close()
    return path


def test_every_codec_gives_the_hosts_bytes_and_each_rank_has_one_context(tmp_path: Path) -> None:
    log = tmp_path / "contexts"
    paths = spawn_ranks(2, _pass_all, env={**ENV, "FAKE_CUDA_LOG": str(log)})
    assert paths == ["shared memory, in slots of host"] * 2
    contexts = [line.split() for line in log.read_text().splitlines()]
    assert [device for _, device in contexts] == ["0", "0"]
    assert len({pid for pid, _ in contexts}) == 2


def test_call_with_pythons_lock_held_is_caught() -> None:
    call = "import ctypes; count = ctypes.c_int(); import pipecomm._core\n"
    call += f"ctypes.%s({str(LIBRARY)!r}).cudaGetDeviceCount(ctypes.byref(count))"
    for loader, is_good in (("CDLL", True), ("PyDLL", False)):
        done = subprocess.run(
            [sys.executable, "-c", call % loader], capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == is_good, done.stderr
        assert ("interpreter's lock" in done.stderr) != is_good


def test_others_are_asked_for_memory_where_the_device_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_STAND_IN_DEVICE", "1")
    asked: list[int] = []
    core.set_memory_ask(lambda: asked.append(1))
    ctypes.CDLL(str(LIBRARY)).fake_cuda_refuse(b"cuMemCreate", _OUT_OF_MEMORY, 1)
    pair = Pair()
    (got,) = pair.forward([torch.ones(5)])
    assert torch.equal(got, torch.ones(5))
    assert pair.low._core.path(1) == "shared memory, in slots of host"
    assert asked == [1]
    pair.close()


def test_memory_that_is_dropped_under_capture_is_given_back_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_STAND_IN_DEVICE", "1")
    set_capturing = ctypes.CDLL(str(LIBRARY)).fake_cuda_set_capturing
    pair = Pair(pool=MemoryPool())

    def pass_one(microbatch: int) -> torch.Tensor:
        (got,) = pair.forward([torch.ones(1 << 20)], microbatch=microbatch)
        return got

    held = pass_one(0)
    before = pair.pool.stats().live_nbytes
    assert before >= 4 << 20
    set_capturing(1)
    del held
    gc.collect()
    assert pair.pool.stats().live_nbytes == before
    set_capturing(0)
    again = pass_one(1)
    assert pair.pool.stats().live_nbytes == before
    assert again.numel() == 1 << 20
    pair.close()
