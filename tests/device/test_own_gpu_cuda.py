"""Two ranks on two GPUs: the driver sees each process on its own GPU, and on no other."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.links.link import Links
from tests.ranks import spawn_ranks


def _gpus_by_pid() -> dict[int, set[str]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    found: dict[int, set[str]] = {}
    for line in text.splitlines():
        pid, gpu = line.split(",")
        found.setdefault(int(pid), set()).add(gpu.strip())
    return found


def _seen(rank: int, size: int, store_path: str) -> tuple[str, list[str]]:
    """This rank's GPU, and those on which the driver sees this process."""
    device = torch.device("cuda", rank)  # never set as torch's current one
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=40, device=device)
    links.begin_step(1)
    value = torch.ones(1 << 20, device=device)
    for microbatch in range(3):
        sent = links.send(
            1 - rank, [value], direction="forward", microbatch=microbatch, codec=Codec("int8")
        )
        (got,) = links.receive(
            1 - rank, direction="forward", microbatch=microbatch, device=device
        ).wait()
        assert got is not None
        assert got.device == device
        sent.wait()
    torch.cuda.synchronize(device)
    seen = _gpus_by_pid().get(os.getpid(), set())
    links.close()
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}", sorted(seen)


def test_each_process_has_a_context_on_its_own_gpu_only() -> None:
    results = spawn_ranks(2, _seen, timeout_s=50)
    if not any(seen for _, seen in results):
        pytest.skip("nvidia-smi names no processes by the numbers that they have here")
    for own, seen in results:
        assert seen == [own]
