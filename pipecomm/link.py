"""The engine's view of the transport: whole messages of tensors to and from neighbouring stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipecomm.codec import Codec
from pipecomm.errors import ConfigError, NotBuiltError, StageFailedError
from pipecomm.memory import MemoryPool, default_pool, tensor_from_block
from pipecomm.rendezvous import Store, announce, connect

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinkCounters", "LinkEmulation", "Links", "Transfer", "announce"]

Direction = Literal["forward", "backward"]

_RAW = "raw"
_QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LinkEmulation:
    """A slow link: megabits per second in each direction (0 = as fast as it goes), one-way ms."""

    mbps: float = 0.0
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mbps", "latency_ms"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}: expected a number of at least 0; got {value!r}")


@dataclass(frozen=True)
class LinkCounters:
    """Totals over all peers. Payload = bytes of the tensors, wire = bytes that crossed for them."""

    messages_sent: int = 0
    messages_received: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    wire_nbytes_sent: int = 0
    wire_nbytes_received: int = 0


class Transfer:
    """A message on its way. Times are seconds of time.monotonic(), 0.0 while not yet reached."""

    def __init__(
        self, core_transfer: Any, timeout_s: float, leaving: list[Tensor] | None = None
    ) -> None:
        self._core = core_transfer
        self._timeout_s = timeout_s
        self._leaving = leaving

    def wait(self) -> list[Tensor | None]:
        """Block until done; give the received tensors (none for a send), once.

        Received tensors own memory of the pool and are leaves whose requires_grad is the
        sender's; None stands for a gradient that does not exist. Raises LinkTimeoutError,
        PeerLostError, StageFailedError, MessageMismatchError or TransportError. The GIL is
        released while waiting.
        """
        self._core.wait(self._timeout_s)
        if self._leaving is not None:
            self._leaving.clear()
        return [_to_tensor(*part) for part in self._core.take_parts()]

    @property
    def is_done(self) -> bool:
        return bool(self._core.is_done)

    @property
    def payload_nbytes(self) -> int:
        return int(self._core.payload_nbytes)

    @property
    def wire_nbytes(self) -> int:
        return int(self._core.wire_nbytes)

    @property
    def posted_s(self) -> float:
        return float(self._core.posted_ns) / 1e9

    @property
    def started_s(self) -> float:
        return float(self._core.started_ns) / 1e9

    @property
    def done_s(self) -> float:
        return float(self._core.done_ns) / 1e9


class Links:
    """This rank's connections to the other stages. Used by one thread."""

    def __init__(self, communicator: Any, timeout_s: float) -> None:
        self._core = communicator
        self._timeout_s = timeout_s
        self._step = 0
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        communicator.set_fail_together(True)

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "pipeline",
        timeout_s: float = 1800.0,
        emulation: LinkEmulation | None = None,
        pool: MemoryPool | None = None,
    ) -> Links:
        """Connect to all stages; every rank calls this. Errors as in rendezvous.connect.

        `timeout_s` bounds the connecting and each later wait.
        """
        slow = emulation or LinkEmulation()
        communicator = connect(
            store,
            rank,
            size,
            name=name,
            timeout_s=timeout_s,
            emulated_mbps=slow.mbps,
            emulated_latency_ms=slow.latency_ms,
            pool=pool or default_pool(),
        )
        return cls(communicator, timeout_s)

    @property
    def rank(self) -> int:
        return int(self._core.rank)

    @property
    def size(self) -> int:
        return int(self._core.size)

    def begin_step(self, step: int) -> None:
        """Drop what is left of earlier steps. All ranks count steps alike, from 1.

        Raises StageFailedError when another rank has given up this step already.
        """
        self._step = step
        self._core.begin_epoch(step)
        self._reap()
        text = self._core.aborted(step)
        if text is not None:
            raise StageFailedError(text)

    def send(
        self,
        peer: int,
        tensors: Sequence[Tensor | None],
        *,
        direction: Direction,
        microbatch: int,
        codec: Codec,
    ) -> Transfer:
        """Post one message of any number of tensors of any shape and dtype; returns at once.

        None stands for a gradient that does not exist. Only float32, bfloat16 and float16
        tensors go through `codec`; others pass bit-exact. The tensors' data is kept alive
        until it has left and must not be changed before the transfer is done.
        """
        self._reap()
        kept: list[Tensor] = []
        parts = [_to_part(tensor, codec, kept) for tensor in tensors]
        transfer = self._core.send(
            peer, parts, direction=direction, microbatch=microbatch, epoch=self._step
        )
        self._leaving.append((transfer, kept))
        return Transfer(transfer, self._timeout_s, kept)

    def receive(self, peer: int, *, direction: Direction, microbatch: int) -> Transfer:
        """Post a receive of whatever message comes for (direction, microbatch) of this step."""
        self._reap()
        transfer = self._core.receive(
            peer, direction=direction, microbatch=microbatch, epoch=self._step
        )
        return Transfer(transfer, self._timeout_s)

    def abort(self, text: str) -> None:
        """Give up this step: the transfers of every rank raise StageFailedError with `text`."""
        self._core.abort(self._step, text)

    def close(self) -> None:
        """End pending transfers and say goodbye. Idempotent."""
        self._core.close()
        self._leaving.clear()

    def counters(self) -> LinkCounters:
        """Totals since connecting."""
        totals = dict.fromkeys(LinkCounters.__dataclass_fields__, 0)
        for peer in range(self.size):
            counters = self._core.counters(peer)
            for field in totals:
                totals[field] += getattr(counters, field)
        return LinkCounters(**totals)

    def _reap(self) -> None:
        while self._leaving and self._leaving[0][0].has_left:
            self._leaving.popleft()


def _to_part(
    tensor: Tensor | None, codec: Codec, kept: list[Tensor]
) -> tuple[int | None, str, tuple[int, ...], str, bool]:
    if tensor is None:
        return (None, "uint8", (), _RAW, False)
    if tensor.device.type != "cpu":
        raise NotBuiltError(
            f"expected a CPU tensor; got one on {tensor.device}: this version moves CPU tensors "
            f"only; move it with .cpu() first"
        )
    data = tensor.detach().contiguous()
    kept.append(data)
    name = codec.name if data.dtype in _QUANTIZABLE else _RAW
    dtype = str(data.dtype).removeprefix("torch.")
    return (data.data_ptr(), dtype, tuple(data.shape), name, tensor.requires_grad)


def _to_tensor(
    block: Any, dtype_name: str, shape: list[int], requires_grad: bool, absent: bool
) -> Tensor | None:
    if absent:
        return None
    dtype = getattr(torch, dtype_name)
    if block is None:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = tensor_from_block(block, shape, dtype)
    return tensor.requires_grad_(requires_grad)
