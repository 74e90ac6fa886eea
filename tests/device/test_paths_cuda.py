"""Which path ran: each way of sharing memory forced once, between two processes on one GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.links.link import Links
from tests.ranks import spawn_ranks

DEVICE = os.environ.get("PIPECOMM_CHECK_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
HAS_DRIVER = IS_CUDA or os.environ.get("FAKE_CUDA_STAND_IN") == "1"
_NAME = "cuda:0" if IS_CUDA else "host"
_SLOTS, _STAGING = f"in slots of {_NAME}", f"from {_NAME} through the host"
# More than the slots of a link hold.
_NUMEL = 12 << 20


def _path(rank: int, size: int, store_path: str) -> str:
    """What rank 0 says of its link, after a tensor has crossed each way, coded and not."""
    device = torch.device(DEVICE, 0) if IS_CUDA else torch.device("cpu")
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=60, device=device)
    links.begin_step(1)
    values = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    for microbatch, codec in enumerate((Codec("raw"), Codec("int8"))):
        expected = values
        if codec.name != "raw":
            expected = codec.decode(codec.encode(values), torch.empty_like(values))
        work = links.send(
            1 - rank, [values.to(device)], direction="forward", microbatch=microbatch, codec=codec
        )
        (got,) = links.receive(
            1 - rank, direction="forward", microbatch=microbatch, device=device
        ).wait()
        assert got is not None
        assert torch.equal(got.cpu(), expected), codec
        work.wait()
    text: str = links._core.path(1 - rank)
    links.close()
    return text


@pytest.mark.parametrize(
    ("sharing", "path"),
    [
        ("auto", _SLOTS),
        ("descriptor", _SLOTS),
        pytest.param(
            *("handle", _SLOTS),
            marks=pytest.mark.skipif(
                not HAS_DRIVER, reason="IPC handles: the host as a device has none"
            ),
        ),
        ("none", _STAGING),
    ],
)
def test_forced_path_is_the_one_that_runs(sharing: str, path: str) -> None:
    env = {} if IS_CUDA else {"PIPECOMM_STAND_IN_DEVICE": "1"}
    paths = spawn_ranks(2, _path, env={**env, "PIPECOMM_DEVICE_SHARING": sharing}, timeout_s=50)
    assert paths == [f"shared memory, {path}"] * 2
