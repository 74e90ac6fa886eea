"""More messages that nobody asks for than a rank keeps: what the two sides are told."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipecomm.errors import LinkTimeoutError
from tests.drop_in.backend_ranks import init
from tests.ranks import spawn_ranks

MIB = 1 << 20
COUNT = 600
TEXT = (
    f"257 messages that no receive asks for are parked ({257 * MIB} bytes), "
    f"which is all that may be ({256 * MIB} bytes)"
)


def _send_far_ahead(rank: int, size: int, store_path: str) -> str:
    """Rank 1 asks for the last of many messages first."""
    init(rank, size, store_path)
    tensor = torch.ones(MIB, dtype=torch.uint8)
    if rank == 0:
        works = [dist.isend(tensor, 1, tag=tag) for tag in range(COUNT)]
        work, seconds = works[-1], 8.0
    else:
        work, seconds = dist.irecv(tensor, 0, tag=COUNT - 1), 6.0
    assert work is not None
    with pytest.raises(LinkTimeoutError) as caught:
        work.wait(timedelta(seconds=seconds))
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_timeout_names_what_is_parked_the_limit_and_the_way_out(transport: str) -> None:
    env = {**os.environ, "PIPECOMM_TRANSPORT": transport}
    sent, received = spawn_ranks(2, _send_far_ahead, timeout_s=60, env=env)
    assert f"rank 1 takes no more: {TEXT}" in sent
    assert TEXT in received
    for text in (sent, received):
        assert "receive in about the order of sending, or send less ahead" in text
