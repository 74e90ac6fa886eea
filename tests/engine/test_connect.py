"""Ranks that come together for a pipeline, or learn why they cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipecomm
from pipecomm.codecs.policy import CodecPolicy
from pipecomm.engine import connect
from pipecomm.engine.connect import choose_codecs
from pipecomm.schedule import Placement
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

    from pipecomm.links import rendezvous

    rendezvous.core.why_unreachable = as_another_user
    return _construct(rank, size, store_path, options)


def test_ranks_that_may_not_reach_each_other_are_named() -> None:
    for text in spawn_ranks(2, _construct_beside_another_user, [{}, {}], timeout_s=60):
        assert text.startswith("UnreachableError: expected rank 1 to be reachable")
        assert "it runs on this host as user id 7" in text


def _construct_where_the_start_fails(rank: int, size: int, store_path: str) -> str:
    from pipecomm.engine import pipeline

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


class _LinksOf:
    """Stands in for the links of one rank out of three."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def _chosen(rank: int, policies: dict[Any, CodecPolicy]) -> dict[Any, str]:
    links: Any = _LinksOf(rank)
    found = choose_codecs(links, Placement.linear(3, 3), policies, torch.device("cpu"))
    return {hop.direction: str(boundary.codec) for hop, boundary in found.items()}


def test_auto_decides_both_directions_of_a_boundary_alike_and_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "boundary_speeds", lambda *_: [float("inf"), 1e8])
    policies: dict[Any, CodecPolicy] = {
        "forward": CodecPolicy("auto"),
        "backward": CodecPolicy("auto", keep_ends_raw=True),
    }
    with caplog.at_level(logging.INFO, "pipecomm"):
        assert _chosen(1, policies) == {"forward": "int8", "backward": "raw"}
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        'codec="auto" decided by the links (memory of one host, 100 MB/s); '
        "the same again: codec=['raw', 'int8']"
    )
    assert second.endswith("the same again: grad_codec=['raw', 'raw']")
    policies["backward"] = CodecPolicy("auto")
    assert _chosen(0, policies) == {"forward": "raw"}
    assert _chosen(2, policies) == {"backward": "int8"}


def test_decision_of_auto_can_be_given_as_the_text_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_asked(*_: Any) -> list[float]:
        raise AssertionError("measured")

    monkeypatch.setattr(connect, "boundary_speeds", not_asked)
    policies: dict[Any, CodecPolicy] = {
        "forward": CodecPolicy(["raw", "int8"]),
        "backward": CodecPolicy("raw"),
    }
    assert _chosen(1, policies) == {"forward": "int8", "backward": "raw"}
