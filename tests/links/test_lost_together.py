"""Which rank a pipeline's ranks name when one of them, next to them or not, is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from pipecomm.errors import PeerLostError
from pipecomm.links.link import Links
from tests.patience import patient
from tests.ranks import run_ranks


def _die_far_away(rank: int, size: int, store_path: str, connected: Any) -> str:
    store = dist.FileStore(store_path, size)
    links = Links.connect(store, rank, size, timeout_s=patient(30))
    links.begin_step(1)
    connected.release()
    with pytest.raises(PeerLostError) as caught:
        links.receive((rank + 1) % 3, direction="forward", microbatch=0).wait()
    return str(caught.value)


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("others", ["are awake", "have ended"])
def test_loss_of_a_rank_that_is_no_neighbour_ends_a_pipeline_too(way: str, others: str) -> None:
    """Rank 0 looks, at the latest, when the survivors that reacted before it are gone as well."""
    connected: Any = multiprocessing.get_context("forkserver").Semaphore(0)

    def strike(pids: list[int]) -> None:
        for _ in range(4):
            assert connected.acquire(timeout=patient(30))
        if others == "have ended":
            os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[3], signal.SIGKILL)
        if others == "have ended":
            psutil.wait_procs([psutil.Process(pid) for pid in pids[1:3]], timeout=patient(10))
            os.kill(pids[0], signal.SIGCONT)

    outcomes = run_ranks(
        4,
        _die_far_away,
        connected,
        timeout_s=60,
        env={"PIPECOMM_TRANSPORT": "tcp"} if way == "tcp" else {},
        meanwhile=strike,
    )
    for rank in range(3):
        assert outcomes[rank][0] == "ok", outcomes[rank][1]
        assert "rank 3 is lost" in outcomes[rank][1]
