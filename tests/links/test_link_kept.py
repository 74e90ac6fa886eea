"""What is sent stays alive until it has left, whatever happens to its step and its links."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipecomm.codecs.codec import Codec
from pipecomm.errors import StageFailedError
from pipecomm.links.link import Links
from tests.links.test_link import Pair, array_of
from tests.patience import patient

RAW = Codec("raw")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def larger_than_the_ring() -> tuple[torch.Tensor, Any]:
    """A tensor, and what tells whether its memory is still held."""
    array = array_of(bytearray(8 << 20))
    return torch.frombuffer(array, dtype=torch.float32).fill_(3), weakref.ref(array)


def becomes_free(owner: Any, *links: Links) -> bool:
    """Whether it is let go while the links are used; what has left is dropped by a later call."""
    deadline = time.monotonic() + patient(10)
    for step in range(100, 10**9):
        if owner() is None or time.monotonic() > deadline:
            return owner() is None
        for one in links:
            one.begin_step(step)
        time.sleep(0.001)
    raise AssertionError("not reached")


def test_core_alone_keeps_what_is_sent_until_it_has_left(pair: Pair) -> None:
    tensor, owner = larger_than_the_ring()
    pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW)
    del tensor
    time.sleep(0.01)
    assert owner() is not None
    (got,) = pair.high.receive(0, direction="forward", microbatch=0).wait()
    assert torch.equal(got, torch.full((2 << 20,), 3.0))
    assert becomes_free(owner, pair.low, pair.high)


def test_message_of_an_aborted_step_keeps_its_memory_while_it_is_half_way(pair: Pair) -> None:
    tensor, owner = larger_than_the_ring()
    pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW)
    del tensor
    time.sleep(0.05)  # it has begun, and its receiver is yet to take it
    pair.low.abort("no more")
    pair.low.begin_step(2)
    gc.collect()
    noise = [torch.full((2 << 20,), -1.0) for _ in range(4)]
    with pytest.raises(StageFailedError, match="no more"):
        pair.high.receive(0, direction="forward", microbatch=0).wait()
    assert becomes_free(owner, pair.high, pair.low)
    del noise


def test_close_lets_go_of_what_nobody_takes() -> None:
    pair = Pair()
    tensor, owner = larger_than_the_ring()
    pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW)
    del tensor
    pair.close()
    other = Pair()
    assert becomes_free(owner, other.low, other.high)
    other.close()
