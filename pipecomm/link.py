"""The engine's view of the transport: whole messages of tensors to and from neighbouring stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipecomm.codec import QUANTIZABLE, Codec
from pipecomm.errors import ConfigError, NotBuiltError, StageFailedError
from pipecomm.flow import FlowLimits
from pipecomm.memory import MemoryPool, default_pool, tensor_from_block
from pipecomm.rendezvous import Store, announce, connect

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinkCounters", "LinkEmulation", "Links", "Transfer", "announce"]

Direction = Literal["forward", "backward"]

_RAW = "raw"
_MAX_PLAN_NBYTES = 1000


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
        self,
        core_transfer: Any,
        timeout_s: float,
        leaving: list[Tensor] | None = None,
        plan: str = "",
    ) -> None:
        self._core = core_transfer
        self._timeout_s = timeout_s
        self._leaving = leaving
        # What the sender says that it runs; the message ends with it.
        self._plan = plan

    def wait(self) -> list[Tensor | None]:
        """Block until done; give the received tensors (none for a send), once.

        Received tensors own memory of the pool and are leaves whose requires_grad is the
        sender's; None stands for a gradient that does not exist. Raises LinkTimeoutError,
        PeerLostError, StageFailedError, MessageMismatchError or TransportError; ConfigError when
        the sender runs another plan. The GIL is released while waiting.
        """
        self._core.wait(self._timeout_s)
        if self._leaving is not None:
            self._leaving.clear()
        tensors = [_to_tensor(*part) for part in self._core.take_parts()]
        if self._plan and self._leaving is None:
            self._check_plan(tensors.pop() if tensors else None)
        return tensors

    def _check_plan(self, sent: Tensor | None) -> None:
        theirs = "something else" if sent is None else _plan_of(sent)
        if theirs != self._plan:
            raise ConfigError(
                f"expected every rank to run the same; got {self._plan} on this rank and "
                f"{theirs} on rank {self._core.peer}"
            )

    @property
    def is_done(self) -> bool:
        return bool(self._core.is_done)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the tensors given to send."""
        return int(self._core.payload_nbytes) - len(self._plan.encode())

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
        self._plan = ""
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
        limits: FlowLimits | None = None,
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
            limits=limits,
        )
        return cls(communicator, timeout_s)

    @property
    def rank(self) -> int:
        return int(self._core.rank)

    @property
    def size(self) -> int:
        return int(self._core.size)

    def begin_step(self, step: int, plan: str = "") -> None:
        """Drop what is left of earlier steps. All ranks count steps alike, from 1.

        `plan` says in words what this rank runs; messages of microbatch 0 carry it, and a rank
        that runs another raises ConfigError. Raises StageFailedError when another rank has
        given up this step already.
        """
        self._step = step
        self._plan = plan
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
        min_nbytes: int = 0,
    ) -> Transfer:
        """Post one message of any number of tensors of any shape and dtype; returns at once.

        None stands for a gradient that does not exist. Only float32, bfloat16 and float16
        tensors of at least `min_nbytes` go through `codec`; others pass bit-exact. The
        tensors' data is kept alive until it has left and must not be changed before the
        transfer is done.
        """
        self._reap()
        kept: list[Tensor] = []
        plan = self._plan if microbatch == 0 else ""
        carried = [*tensors, _plan_tensor(plan)] if plan else tensors
        parts = [_to_part(tensor, codec, min_nbytes, kept) for tensor in carried]
        transfer = self._core.send(
            peer, parts, direction=direction, microbatch=microbatch, epoch=self._step
        )
        self._leaving.append((transfer, kept))
        return Transfer(transfer, self._timeout_s, kept, plan)

    def receive(self, peer: int, *, direction: Direction, microbatch: int) -> Transfer:
        """Post a receive of whatever message comes for (direction, microbatch) of this step."""
        self._reap()
        transfer = self._core.receive(
            peer, direction=direction, microbatch=microbatch, epoch=self._step
        )
        plan = self._plan if microbatch == 0 else ""
        return Transfer(transfer, self._timeout_s, plan=plan)

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value`, in rank order, on every rank; all have one shape and dtype.

        It goes up through all ranks and back, as microbatch 0, and passes bit-exact. Between
        begin_step() and the next one, this replaces sends and receives. Errors as in
        Transfer.wait.
        """
        values = value.unsqueeze(0)
        if self.rank > 0:
            values = torch.cat([self._receive_one(self.rank - 1, "forward"), values])
        if self.rank < self.size - 1:
            self._send_one(self.rank + 1, values, "forward")
            values = self._receive_one(self.rank + 1, "backward")
        if self.rank > 0:
            self._send_one(self.rank - 1, values, "backward")
        return list(values)

    def _send_one(self, peer: int, value: Tensor, direction: Direction) -> None:
        self.send(peer, [value], direction=direction, microbatch=0, codec=Codec(_RAW)).wait()

    def _receive_one(self, peer: int, direction: Direction) -> Tensor:
        (tensor,) = self.receive(peer, direction=direction, microbatch=0).wait()
        assert tensor is not None
        return tensor

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


def _plan_tensor(plan: str) -> Tensor:
    return torch.frombuffer(bytearray(plan.encode()), dtype=torch.uint8)


def _plan_of(sent: Tensor) -> str:
    """The plan a peer sent, or some words for what is none: it may run another version."""
    if sent.dtype != torch.uint8 or sent.dim() != 1 or sent.numel() > _MAX_PLAN_NBYTES:
        return "something else"
    return bytes(sent.tolist()).decode(errors="replace")


def _to_part(
    tensor: Tensor | None, codec: Codec, min_nbytes: int, kept: list[Tensor]
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
    is_coded = data.dtype in QUANTIZABLE and data.nbytes >= min_nbytes
    name = codec.name if is_coded else _RAW
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
