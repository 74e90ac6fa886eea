"""A GPU that torch's cache has filled: transfers still arrive, in whatever way has room."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.links.link import Links
from tests.ranks import spawn_ranks

_PIECES = (1 << 30, 64 << 20, 2 << 20)


def _fill_the_cache() -> int:
    """All that is free goes to torch, which keeps it for itself; gives its bytes."""
    held = []
    for nbytes in _PIECES:
        try:
            while True:
                held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return sum(piece.nbytes for piece in held)


def _arrives(rank: int, size: int, store_path: str) -> str:
    device = torch.device("cuda", 0)
    store = dist.FileStore(store_path, size)
    values = torch.randn(12 << 20, device=device)
    expected = torch.full_like(values, 7.0)
    torch.cuda.synchronize()
    store.set(f"ready/{rank}", "1")
    store.wait(["ready/0", "ready/1"])
    if rank == 0:
        assert _fill_the_cache() > 1 << 30
        assert torch.cuda.mem_get_info(device)[0] < 256 << 20
        store.set("full", "1")
    store.wait(["full"])
    links = Links.connect(store, rank, size, timeout_s=40, device=device)
    links.begin_step(1)
    for microbatch in range(3):
        sent = links.send(
            *(1 - rank, [expected]),
            direction="forward",
            microbatch=microbatch,
            codec=Codec("raw"),
        )
        (got,) = links.receive(
            1 - rank, direction="forward", microbatch=microbatch, device=device
        ).wait()
        assert got is not None
        assert torch.equal(got, expected)
        sent.wait()
    text: str = links._core.path(1 - rank)
    links.close()
    return text


def test_tensors_cross_while_torchs_cache_has_all_memory() -> None:
    for path in spawn_ranks(2, _arrives, timeout_s=50):
        assert "in slots of cuda:0" in path or "through the host" in path
