"""The orders of torch.distributed.pipelining, made without running any of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

__all__ = ["torch_rows", "torch_stages", "torch_v_stages"]


def torch_stages(num_stages: int, group_size: int, rank: int = 0) -> list[SimpleNamespace]:
    """What torch's schedules read of a PipelineStage before they run."""
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=group_size,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            submod=torch.nn.Identity(),
        )
        for index in range(rank, num_stages, group_size)
    ]


def torch_rows(actions: dict[int, list[object]]) -> list[list[str]]:
    """Their compute actions as text; the mark for reducing gradients is not one."""
    rows = ([str(action) for action in actions[rank] if action] for rank in sorted(actions))
    return [[text for text in row if "REDUCE_GRAD" not in text] for row in rows]


def torch_v_stages(num_ranks: int) -> list[SimpleNamespace]:
    """Rank 0's two stages where stages are placed in a V: the first and the last."""
    stages = torch_stages(2 * num_ranks, num_ranks)
    stages[1].stage_index, stages[1].is_last = 2 * num_ranks - 1, True
    return stages
