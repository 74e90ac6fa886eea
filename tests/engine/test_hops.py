"""The way of one activation through the code is short, down on one side and up on the other."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.hops import FROM_RING, INTO_RING, MAX_HOPS, Hop, record, rises, trace
from tests.ranks import spawn_ranks

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def sides() -> tuple[list[Hop], list[Hop]]:
    sender, receiver = spawn_ranks(2, trace)
    return [*sender, *INTO_RING], [*FROM_RING, *receiver]


def test_way_is_short_on_both_sides(sides: tuple[list[Hop], list[Hop]]) -> None:
    for name, hops in zip(("sender", "receiver"), sides, strict=True):
        print(f"{name}: {len(hops)} calls")
        print(*(f"  {file}: {function}" for file, function in hops), sep="\n")
        assert len(hops) <= MAX_HOPS


def test_way_begins_at_train_step_and_ends_in_the_next_stage(
    sides: tuple[list[Hop], list[Hop]],
) -> None:
    sender, receiver = sides
    assert sender[0] == ("pipecomm/engine/pipeline.py", "Pipeline.train_step")
    assert sender[-len(INTO_RING) - 1] == ("pipecomm/links/link.py", "Links.send")
    assert receiver[len(FROM_RING)] == ("pipecomm/links/transfer.py", "Transfer.wait")
    assert receiver[-1] == ("tests/engine/hops.py", "_Stage.forward")


def test_way_takes_no_step_back_up(sides: tuple[list[Hop], list[Hop]]) -> None:
    sender, receiver = sides
    assert rises(sender) == []
    assert rises([*reversed(receiver)]) == []


def test_step_back_up_is_found() -> None:
    down = [("pipecomm/engine/a.py", "f"), ("pipecomm/links/b.py", "g"), ("csrc/c.h", "h")]
    assert rises(down) == []
    assert rises([*down, ("pipecomm/engine/a.py", "k")]) == [
        "('pipecomm/engine/a.py', 'k') after ('csrc/c.h', 'h')"
    ]


def test_recording_needs_a_call_of_the_core() -> None:
    with pytest.raises(KeyError, match="send"):
        record(lambda: None, is_sender=True)


@pytest.mark.parametrize("hops", [INTO_RING, FROM_RING], ids=["into the ring", "from the ring"])
def test_hops_in_cpp_are_in_the_sources(hops: list[Hop]) -> None:
    texts = {file: (ROOT / file).read_text() for file, _ in hops}
    for file, function in hops:
        assert _names(texts[file], function), f"{file} has no {function}"
    for (file, _), (_, called) in pairwise(hops[:-1]):
        assert _names(texts[file], called) or called in ("end_part", "take"), (file, called)


def test_function_that_is_not_there_is_noticed() -> None:
    assert _names("void f(int x) {", "f")
    assert _names('.def(\n          "send",', "send")
    assert not _names("void f(int x) {", "g")
    assert not _names("void of(int x) {", "f")


def _names(text: str, function: str) -> bool:
    return re.search(rf'(?<!\w){function}\(|"{function}",', text) is not None
