"""The calls through which one activation goes, seen while two ranks run a step.

Python's part is recorded; that of C++ is listed here, and compared with the sources. A side's hops
are the calls that are open when the extension is entered with the activation, or left with it, and
those from there on: into the ring for the sender, into the next stage's module for the receiver.
Calls that return before (checks, counters) are not on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecomm

__all__ = ["FROM_RING", "INTO_RING", "MAX_HOPS", "Hop", "record", "rises", "trace"]

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_HOPS = 14
# File, and function in it: a small message, which leaves at once.
Hop = tuple[str, str]
INTO_RING: list[Hop] = [
    ("csrc/bindings/transport_py.cpp", "send"),
    ("csrc/transport/group/communicator.cpp", "send"),
    ("csrc/transport/group/communicator.cpp", "submit"),
    ("csrc/transport/group/communicator.cpp", "send_at_once"),
    ("csrc/transport/group/link.cpp", "push"),
    ("csrc/transport/moving/sender.cpp", "pump"),
    ("csrc/transport/moving/sender.cpp", "write_record"),
    ("csrc/transport/moving/way_out.h", "move"),
]
FROM_RING: list[Hop] = [
    ("csrc/transport/moving/receiver.cpp", "pump"),
    ("csrc/transport/moving/receiver.cpp", "take_record"),
    ("csrc/transport/moving/way_in.h", "take"),
    ("csrc/transport/moving/receiver.cpp", "end_part"),
    ("csrc/transport/moving/receiver.cpp", "deliver"),
    ("csrc/transport/matching/transfer.cpp", "finish"),
    ("csrc/bindings/transport_py.cpp", "take"),
]
# Rooms from the top down; the activation goes down where it leaves, and up where it arrives.
_FLOORS = ("tests", "engine", "links", "csrc")


class _Stage(nn.Module):
    """A module whose forward can be told from others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def trace(rank: int, size: int, store_path: str) -> list[Hop]:
    """The Python hops of the first activation that this rank sends, or takes, in a step."""
    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with pipecomm.Pipeline(_Stage(), loss_fn=nn.functional.mse_loss) as pipeline:
        data = torch.ones(2, 4)
        pipeline.train_step(data, data)  # what is looked up once is
        dist.barrier()
        hops = record(lambda: pipeline.train_step(data, data), is_sender=rank == 0)
    dist.destroy_process_group()
    return hops


def record(step: Callable[[], Any], *, is_sender: bool) -> list[Hop]:
    """Run the step; give the calls that are open when the core's send() is entered.

    For the receiver: those that the core's take() returns through, and then those into forward().
    """
    seen: dict[str, list[Hop]] = {}

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in ("send", "take"):
            if "pipecomm._core" in (argument.__doc__ or ""):
                seen.setdefault(argument.__name__, _open_calls(frame))
        elif event == "call" and frame.f_code is _Stage.forward.__code__ and "take" in seen:
            seen.setdefault("forward", _open_calls(frame))

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    if is_sender:
        return seen["send"]
    common = 0
    while seen["take"][common] == seen["forward"][common]:
        common += 1
    # Up through the last call that both share, and down again.
    return [*reversed(seen["take"][common - 1 :]), *seen["forward"][common:]]


def rises(hops: list[Hop]) -> list[str]:
    """Where a way down goes up again, as text."""
    floors = [_FLOORS.index(_room(file)) for file, _ in hops]
    return [
        f"{hops[i]} after {hops[i - 1]}" for i in range(1, len(hops)) if floors[i] < floors[i - 1]
    ]


def _room(file: str) -> str:
    parts = file.split("/")
    return parts[1] if parts[0] == "pipecomm" else parts[0]


def _open_calls(frame: FrameType | None) -> list[Hop]:
    """Own functions, outermost first."""
    calls: list[Hop] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        own = frame.f_locals.get("self")
        is_ours = path.is_relative_to(ROOT / "pipecomm") or frame.f_code is _Stage.forward.__code__
        if is_ours:
            prefix = "" if own is None else f"{type(own).__name__}."
            file = path.relative_to(ROOT).as_posix()
            calls.append((file, f"{prefix}{frame.f_code.co_name}"))
        frame = frame.f_back
    return list(reversed(calls))
