"""How many bytes per second cross each boundary between stages, by trying where need be."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

import torch

from pipecomm.codecs.codec import Codec
from pipecomm.direction import OPPOSITE, Direction
from pipecomm.links.link import LinkEmulation, Links
from pipecomm.schedule import Placement

__all__ = ["boundary_speeds", "measure_speeds"]

_RAW = Codec("raw")
_FIRST_NBYTES = 64 << 10
_MAX_NBYTES = 8 << 20
_NUM_TRIES = 3
# Long enough that a wake-up more or less does not matter.
_ENOUGH_S = 0.03
_CPU = torch.device("cpu")


def boundary_speeds(
    links: Links,
    placement: Placement,
    device: torch.device = _CPU,
    emulation: LinkEmulation | None = None,
) -> list[float]:
    """Bytes per second of each boundary, by its slower direction: one list, equal on all ranks.

    Infinity inside a rank and between two ranks of one host, the rate of an emulated link as it
    is; only what is neither is measured. All ranks call this together, as measure_speeds.
    """
    remote = [peer for peer in placement.peers_of(links.rank) if not links.shares_memory(peer)]
    measured = measure_speeds(links, placement, device, remote)
    emulated = 0.0 if emulation is None else emulation.mbps * 1e6 / 8
    own = [
        (emulated or measured.get(hop.receiver, math.inf))
        if hop.is_message and hop.sender == links.rank
        else math.inf
        for hop in placement.hops
    ]
    slowest = torch.stack(links.gather(torch.tensor(own, dtype=torch.float64))).amin(0)
    return [
        min(float(speed) for hop, speed in zip(placement.hops, slowest, strict=True)
            if hop.boundary == boundary)
        for boundary in range(placement.num_boundaries)
    ]  # fmt: skip


def measure_speeds(
    links: Links,
    placement: Placement,
    device: torch.device = _CPU,
    peers: Collection[int] | None = None,
) -> dict[int, float]:
    """Bytes per second from this rank to each of those that it sends to.

    All ranks call this together, between begin_step() and the next one. One link after the other
    is tried, between tensors on each rank's `device`, with messages that grow until one takes
    30 ms; latency is taken off. `peers` leaves out links to others (default: none); both ranks of
    a link must. Errors as in Transfer.wait.
    """
    speeds: dict[int, float] = {}
    ways = {(hop.sender, hop.receiver): hop.direction for hop in placement.hops if hop.is_message}
    # In the same order on all ranks, so that no two wait for each other.
    for (sender, receiver), direction in ways.items():
        if receiver == links.rank and (peers is None or sender in peers):
            _answer(links, sender, direction, device)
        if sender == links.rank and (peers is None or receiver in peers):
            speeds[receiver] = _ask(links, receiver, direction, device)
    return speeds


def _ask(links: Links, peer: int, direction: Direction, device: torch.device) -> float:
    latency_s = _best_s(links, peer, direction, _data(1, device))
    nbytes = _FIRST_NBYTES
    while True:
        taken_s = _best_s(links, peer, direction, _data(nbytes, device)) - latency_s
        if taken_s >= _ENOUGH_S or nbytes >= _MAX_NBYTES:
            break
        nbytes *= 2
    _send(links, peer, direction, _data(0, device))
    return nbytes / max(taken_s, 1e-9)


def _best_s(links: Links, peer: int, direction: Direction, data: torch.Tensor) -> float:
    """Other work on the machine only ever makes a round trip longer."""
    return min(_round_trip_s(links, peer, direction, data) for _ in range(_NUM_TRIES))


def _round_trip_s(links: Links, peer: int, direction: Direction, data: torch.Tensor) -> float:
    answer = links.receive(peer, direction=OPPOSITE[direction], microbatch=1)
    start_s = time.monotonic()
    _send(links, peer, direction, data)
    answer.wait()
    return time.monotonic() - start_s


def _answer(links: Links, peer: int, direction: Direction, device: torch.device) -> None:
    """Answer each message with an empty one; an empty one is the last."""
    while True:
        receive = links.receive(peer, direction=direction, microbatch=1, device=device)
        (tensor,) = receive.wait()
        if tensor is None or tensor.numel() == 0:
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        _send(links, peer, OPPOSITE[direction], _data(0, _CPU))


def _data(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _send(links: Links, peer: int, direction: Direction, data: torch.Tensor) -> None:
    links.send(peer, [data], direction=direction, microbatch=1, codec=_RAW).wait()
