"""How many bytes per second the links to the neighbouring stages carry, by trying."""

from __future__ import annotations

import time

import torch

from pipecomm.codec import Codec
from pipecomm.link import Links
from pipecomm.stats import Direction

__all__ = ["measure_speeds"]

_RAW = Codec("raw")
_FIRST_NBYTES = 64 << 10
_MAX_NBYTES = 8 << 20
_NUM_TRIES = 3
# Long enough that a wake-up more or less does not matter.
_ENOUGH_S = 0.03
_STEPS: dict[Direction, int] = {"forward": 1, "backward": -1}
_ANSWERS: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}


def measure_speeds(links: Links) -> dict[Direction, float]:
    """Bytes per second from this rank to the next ("forward") and the one before ("backward").

    All ranks call this together, between begin_step() and the next one. One link after the other
    is tried, with messages that grow until one takes 30 ms; latency is taken off. The first rank
    has no "backward", the last no "forward". Errors as in Transfer.wait.
    """
    speeds: dict[Direction, float] = {}
    for direction, step in _STEPS.items():
        asking, asked = links.rank - step, links.rank + step
        if 0 <= asking < links.size:
            _answer(links, asking, direction)
        if 0 <= asked < links.size:
            speeds[direction] = _ask(links, asked, direction)
    return speeds


def _ask(links: Links, peer: int, direction: Direction) -> float:
    latency_s = _best_s(links, peer, direction, nbytes=1)
    nbytes = _FIRST_NBYTES
    while True:
        taken_s = _best_s(links, peer, direction, nbytes) - latency_s
        if taken_s >= _ENOUGH_S or nbytes >= _MAX_NBYTES:
            break
        nbytes *= 2
    _send(links, peer, direction, nbytes=0)
    return nbytes / max(taken_s, 1e-9)


def _best_s(links: Links, peer: int, direction: Direction, nbytes: int) -> float:
    """Other work on the machine only ever makes a round trip longer."""
    return min(_round_trip_s(links, peer, direction, nbytes) for _ in range(_NUM_TRIES))


def _round_trip_s(links: Links, peer: int, direction: Direction, nbytes: int) -> float:
    answer = links.receive(peer, direction=_ANSWERS[direction], microbatch=1)
    start_s = time.monotonic()
    _send(links, peer, direction, nbytes)
    answer.wait()
    return time.monotonic() - start_s


def _answer(links: Links, peer: int, direction: Direction) -> None:
    """Answer each message with an empty one; an empty one is the last."""
    while True:
        (tensor,) = links.receive(peer, direction=direction, microbatch=1).wait()
        if tensor is None or tensor.numel() == 0:
            return
        _send(links, peer, _ANSWERS[direction], nbytes=0)


def _send(links: Links, peer: int, direction: Direction, nbytes: int) -> None:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    links.send(peer, [data], direction=direction, microbatch=1, codec=_RAW).wait()
