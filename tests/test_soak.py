"""A short soak, and that it would see what it looks for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from tests import soak


@pytest.fixture(scope="module")
def reports() -> list[soak.Report]:
    return soak.soak(1000, timeout_s=90)


def test_random_messages_between_four_ranks_all_arrive_unharmed(
    reports: list[soak.Report],
) -> None:
    assert soak.problems(reports) == []
    assert sum(report.received for report in reports) == 1000
    assert sum(report.from_anybody for report in reports) > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"wrong": ["a message"]}, "expected a message"),
        ({"received": 9}, "not as many messages were received as sent"),
        ({"resident_kib": 103_000}, "private_kib grew from 30000 to 33000"),
        ({"num_fds": 24}, "num_fds grew from 20 to 24"),
        ({"num_threads": 6}, "num_threads grew from 5 to 6"),
        ({"resident_kib": 110_000, "mapped_kib": 80_000}, ""),
        ({"num_fds": 23}, ""),
    ],
)
def test_what_is_a_problem(change: dict[str, Any], text: str) -> None:
    first = soak.Memory(resident_kib=100_000, mapped_kib=70_000, num_fds=20, num_threads=5)
    fields = {field.name for field in dataclasses.fields(soak.Memory)}
    last = dataclasses.replace(first, **{k: v for k, v in change.items() if k in fields})
    report = soak.Report(sent=10, received=10, memory=[first, last])
    report = dataclasses.replace(report, **{k: v for k, v in change.items() if k not in fields})
    found = soak.problems([report])
    assert [text in line for line in found] == ([True] if text else [])


def test_plan_is_the_same_on_all_ranks_and_covers_what_it_should() -> None:
    rounds = [soak.plan_round(7, index, 4) for index in range(30)]
    assert rounds[3] == soak.plan_round(7, 3, 4)
    assert rounds[3] != soak.plan_round(8, 3, 4)
    messages = [message for messages in rounds for message in messages]
    assert {message.dtype for message in messages} == set(soak.DTYPES)
    assert {message.tag for message in messages} >= set(range(soak.TAGS))
    assert any(message.nbytes == 0 for message in messages)
    assert any(message.nbytes > 4 << 20 for message in messages)
    pairs = Counter((message.source, message.target) for message in messages)
    assert len(pairs) == 4 * 3
    assert all(message.source != message.target for message in messages)


def test_order_of_a_rank_keeps_what_must_be_first_in_first_out() -> None:
    messages = soak.plan_round(0, 0, 4)
    worker = soak.Rank(1, 0)
    mixed = list(worker._mix(messages))
    assert mixed != messages
    assert Counter(map(id, mixed)) == Counter(map(id, messages))
    for key in {(message.source, message.target, message.tag) for message in messages}:
        of_key = [
            [m for m in order if (m.source, m.target, m.tag) == key] for order in (messages, mixed)
        ]
        assert [*map(id, of_key[0])] == [*map(id, of_key[1])]


def test_one_changed_bit_is_seen() -> None:
    worker = soak.Rank(0, 0)
    for message in soak.plan_round(0, 0, 4):
        arrived = worker._contents(message).clone()
        worker._check(arrived, message)
        assert worker.report.wrong == []
        if message.nbytes:
            arrived.view(torch.uint8)[message.nbytes // 2] ^= 1
            worker._check(arrived, message)
            assert worker.report.wrong == [str(message)]
            worker.report.wrong.clear()


def test_what_was_sent_is_overwritten_only_in_memory_of_its_own() -> None:
    worker = soak.Rank(0, 0)
    noise = worker.noise.clone()
    for message in soak.plan_round(0, 0, 4):
        tensor = worker._tensor_for(message)
        worker._overwrite(tensor)
    assert torch.equal(worker.noise, noise)
