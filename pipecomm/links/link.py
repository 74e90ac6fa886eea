"""The engine's view of the transport: whole messages of tensors to and from neighbouring stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from pipecomm import settings
from pipecomm._native import core
from pipecomm.codecs.codec import Codec
from pipecomm.direction import Direction
from pipecomm.errors import ConfigError, NotBuiltError, StageFailedError
from pipecomm.links.agreement import title_tensor
from pipecomm.links.limits import FlowLimits
from pipecomm.links.part import CPU_INDEX, to_part
from pipecomm.links.rendezvous import Store, announce, connect
from pipecomm.links.transfer import Side, Transfer
from pipecomm.memory.pool import MemoryPool, default_pool

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinkCounters", "LinkEmulation", "Links", "Transfer", "announce"]

_RAW = "raw"
_CPU = torch.device("cpu")
_NO_STAGE = -1


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


class Links:
    """This rank's connections to the other stages. Used by one thread.

    Its tensors lie on the CPU and on one CUDA device.
    """

    def __init__(self, communicator: core.Communicator, timeout_s: float) -> None:
        self._core = communicator
        self._timeout_s = timeout_s
        self._step = 0
        self._title = ""
        communicator.set_fail_together(True)
        self._side = Side(communicator.use_device(CPU_INDEX))

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "pipeline",
        settings: str = "",
        timeout_s: float = 1800.0,
        emulation: LinkEmulation | None = None,
        pool: MemoryPool | None = None,
        limits: FlowLimits | None = None,
        device: torch.device = _CPU,
    ) -> Links:
        """Connect to all stages; every rank calls this. Errors as in rendezvous.connect.

        `settings` must be the same on every rank, `timeout_s` bounds the connecting and each
        later wait. `device` is as in use_device, before another rank can send to it.
        """
        slow = emulation or LinkEmulation()

        def make(communicator: core.Communicator) -> Links:
            links = cls(communicator, timeout_s)
            links.use_device(device)
            return links

        made: Links = connect(
            store,
            rank,
            size,
            name=name,
            settings=settings,
            timeout_s=timeout_s,
            emulated_mbps=slow.mbps,
            emulated_latency_ms=slow.latency_ms,
            pool=pool or default_pool(),
            limits=limits,
            make=make,
        )
        return made

    @property
    def rank(self) -> int:
        return self._core.rank

    @property
    def size(self) -> int:
        return self._core.size

    def shares_memory(self, peer: int) -> bool:
        """Whether that stage runs on this host; the same seen from either of the two."""
        return self._core.shares_memory(peer)

    def use_device(self, device: torch.device) -> None:
        """Say where tensors will lie. What other ranks send to a device that this rank has not
        named, or used, by then, comes through the host.

        Raises TensorError for a second CUDA device, NotBuiltError for devices other than CUDA's
        and for a build without CUDA.
        """
        if device.type not in ("cpu", "cuda"):
            raise NotBuiltError(
                f"expected tensors on the CPU or a CUDA device; got {device}: this version moves "
                f"no others; move them with .cpu() first"
            )
        if device.type == "cpu" or device == self._side.name:
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        used = self._core.use_device(index)
        core.set_memory_ask(torch.cuda.empty_cache)
        self._side.device, self._side.name = used, torch.device("cuda", index)

    def begin_step(self, step: int, title: str = "", iteration: int | None = None) -> None:
        """Drop what is left of earlier steps. All ranks count steps alike, from 1.

        Errors and hang reports number the user's `iteration` where there is one.

        `title` says in words what this rank runs; messages of microbatch 0 carry it, and a rank
        that runs another raises ConfigError. Raises StageFailedError when another rank has
        given up this step already.
        """
        self._step = step
        self._title = title
        self._core.begin_epoch(step, iteration)
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
        stage: int = _NO_STAGE,
        min_nbytes: int = settings.MIN_NBYTES.default,
    ) -> Transfer:
        """Post one message of any number of tensors of any shape and dtype; returns at once.

        `stage` is the stage that takes it: two ranks may share several boundaries.
        None stands for a gradient that does not exist. What `codec` covers goes through it, from
        `min_nbytes` on; the rest passes bit-exact. The tensors' data is kept alive until it has
        left, and must not be changed, nor its storage resized, before the transfer is done.

        Raises TensorError for a tensor whose elements are not at its address, of more than 16
        dimensions, or beyond 65535 in a message.
        """
        title = self._title if microbatch == 0 else ""
        carried = [*tensors, title_tensor(title)] if title else tensors
        for tensor in tensors:
            self.use_device(_CPU if tensor is None else tensor.device)
        made = [to_part(tensor, codec, min_nbytes) for tensor in carried]
        kept = [tensor for _, tensor in made if tensor is not None]
        is_on_device = any(tensor.is_cuda for tensor in kept)
        transfer = self._core.send(
            peer,
            [part for part, _ in made],
            direction=direction,
            microbatch=microbatch,
            epoch=self._step,
            stage=stage,
            device=self._side.device if is_on_device else None,
            stream=self._side.current_stream(),
            kept=kept,
        )
        return Transfer(transfer, self._timeout_s, self._side, kept=kept, title=title)

    def receive(
        self,
        peer: int,
        *,
        direction: Direction,
        microbatch: int,
        stage: int = _NO_STAGE,
        device: torch.device = _CPU,
    ) -> Transfer:
        """Post a receive of whatever message comes for (direction, stage, microbatch) of this step.

        Its tensors will lie on `device`, wherever the sender's do.
        """
        self.use_device(device)
        transfer = self._core.receive(
            peer, direction=direction, microbatch=microbatch, epoch=self._step, stage=stage
        )
        title = self._title if microbatch == 0 else ""
        return Transfer(transfer, self._timeout_s, self._side, target=device, title=title)

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value`, in rank order, on every rank; all have one shape and dtype.

        It goes up through all ranks and back, as microbatch 0, and passes bit-exact. Between
        begin_step() and the next one, this replaces sends and receives. Errors as in
        Transfer.wait. The results are on the CPU.
        """
        values = value.cpu().unsqueeze(0)
        if self.rank > 0:
            values = torch.cat([self._receive_one(self.rank - 1, "forward"), values])
        if self.rank < self.size - 1:
            self._send_one(self.rank + 1, values, "forward")
            values = self._receive_one(self.rank + 1, "backward")
        if self.rank > 0:
            self._send_one(self.rank - 1, values, "backward")
        return list(values)

    def _send_one(self, peer: int, value: Tensor, direction: Direction) -> None:
        # Named after the rank that takes it, as its first stage is: a rank that runs a step
        # instead meets this message, and both are told.
        self.send(
            peer, [value], direction=direction, microbatch=0, stage=peer, codec=Codec(_RAW)
        ).wait()

    def _receive_one(self, peer: int, direction: Direction) -> Tensor:
        (tensor,) = self.receive(peer, direction=direction, microbatch=0, stage=self.rank).wait()
        assert tensor is not None
        return tensor

    def abort(self, text: str) -> None:
        """Give up this step: the transfers of every rank raise StageFailedError with `text`."""
        self._core.abort(self._step, text)

    def close(self) -> None:
        """End pending transfers and say goodbye. Idempotent."""
        self._core.close()

    def counters(self) -> LinkCounters:
        """Totals since connecting."""
        by_peer = [self._core.counters(peer) for peer in range(self.size)]
        names = [field.name for field in fields(LinkCounters)]
        return LinkCounters(*(sum(getattr(one, name) for one in by_peer) for name in names))
