"""Ranks that come together for a pipeline, or learn why they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipecomm
from tests.ranks import spawn_ranks


def _construct(rank: int, size: int, store_path: str, options: list[dict[str, Any]]) -> str:
    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    try:
        pipecomm.Pipeline(torch.nn.Linear(2, 2), **options[rank])
    except pipecomm.PipecommError as error:
        return f"{type(error).__name__}: {error}"
    return "constructed"


@pytest.mark.parametrize("wrong", [{"codec": "int3"}, {"num_microbatches": 0}, {"timeout_s": -1}])
def test_rank_whose_arguments_are_refused_leaves_nobody_waiting(wrong: dict[str, Any]) -> None:
    ending = spawn_ranks(2, _construct, [{}, wrong], timeout_s=60)
    assert ending[1].startswith("ConfigError")
    assert ending[0].startswith("StageFailedError")
    assert "rank 1 cannot make its pipeline: ConfigError" in ending[0]


def test_ranks_of_different_codecs_refuse_each_other() -> None:
    options = [{"codec": "int4"}, {"codec": "int8"}]
    for text in spawn_ranks(2, _construct, options, timeout_s=60):
        assert text.startswith("ConfigError")
        assert "int4" in text
        assert "int8" in text


def _construct_beside_another_user(
    rank: int, size: int, store_path: str, options: list[dict[str, Any]]
) -> str:
    def as_another_user(own: str, peer: str) -> str:
        return "" if own == peer else "it runs on this host as user id 7"

    from pipecomm import rendezvous

    rendezvous.core.why_unreachable = as_another_user
    return _construct(rank, size, store_path, options)


def test_ranks_that_may_not_reach_each_other_are_named() -> None:
    for text in spawn_ranks(2, _construct_beside_another_user, [{}, {}], timeout_s=60):
        assert text.startswith("UnreachableError: expected rank 1 to be reachable")
        assert "it runs on this host as user id 7" in text


def _construct_where_the_start_fails(rank: int, size: int, store_path: str) -> str:
    from pipecomm import pipeline

    def fails(*_: Any) -> Any:
        raise pipecomm.TensorError("no speed to be had")

    if rank == 1:
        pipeline.choose_codecs = fails
    text = _construct(rank, size, store_path, [{"codec": "auto"}] * size)
    dist.barrier()
    return text


def test_failure_while_codecs_are_chosen_ends_the_start_on_every_rank() -> None:
    first, second = spawn_ranks(2, _construct_where_the_start_fails, timeout_s=60)
    assert second.startswith("TensorError: no speed to be had")
    assert "stage 1 of 2: TensorError" in first
    assert "no speed to be had" in first
