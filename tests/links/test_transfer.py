"""A message on its way: its times, its sizes, what waiting for it gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipecomm.codecs.codec import Codec
from pipecomm.errors import ConfigError
from pipecomm.links.transfer import Transfer
from tests.links.test_link import Pair

RAW = Codec("raw")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def exchange(pair: Pair, tensor: torch.Tensor) -> tuple[Transfer, Transfer, torch.Tensor]:
    """The send, the receive, and what has come."""
    send = pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW)
    receive = pair.high.receive(0, direction="forward", microbatch=0)
    (got,) = receive.wait()
    assert got is not None
    assert send.wait() == []
    return send, receive, got


def test_times_are_in_order_and_the_same_clock_on_both_sides(pair: Pair) -> None:
    send, receive, _ = exchange(pair, torch.ones(1000))
    assert send.is_done
    assert receive.is_done
    assert 0 < send.posted_s <= send.started_s <= send.done_s
    assert send.posted_s <= receive.started_s <= receive.done_s


def test_sizes_are_those_of_the_tensors_and_of_what_crossed(pair: Pair) -> None:
    for transfer in exchange(pair, torch.ones(1000))[:2]:
        assert transfer.payload_nbytes == 4000
        assert transfer.wire_nbytes >= 4000


def test_title_travels_and_is_not_counted_as_payload(pair: Pair) -> None:
    for links in (pair.low, pair.high):
        links.begin_step(2, "train_step with num_microbatches=1")
    send, receive, got = exchange(pair, torch.ones(10))
    assert send.payload_nbytes == receive.payload_nbytes == 40
    assert torch.equal(got, torch.ones(10))


def test_other_title_is_refused_naming_both(pair: Pair) -> None:
    pair.low.begin_step(2, "train_step")
    pair.high.begin_step(2, "eval_step")
    pair.low.send(1, [torch.ones(1)], direction="forward", microbatch=0, codec=RAW)
    with pytest.raises(ConfigError, match="eval_step on this rank and train_step on rank 0"):
        pair.high.receive(0, direction="forward", microbatch=0).wait()


def test_received_tensors_are_given_once(pair: Pair) -> None:
    _, receive, _ = exchange(pair, torch.ones(3))
    assert receive.wait() == []
