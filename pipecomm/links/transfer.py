"""A message on its way: waiting for it, what it brought, when it moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipecomm._native import core
from pipecomm.links.agreement import check_title
from pipecomm.links.part import to_tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Side", "Transfer"]

_CPU = torch.device("cpu")


@dataclass
class Side:
    """The device of a rank's tensors: the core's, none for the CPU, and torch's name for it."""

    device: core.Device | None = None
    name: torch.device = _CPU

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.name).cuda_stream if self.name.type == "cuda" else 0


class Transfer:
    """A message on its way. Times are seconds of time.monotonic(), 0.0 while not yet reached."""

    def __init__(
        self,
        core_transfer: core.Transfer,
        timeout_s: float,
        side: Side,
        *,
        target: torch.device = _CPU,
        kept: list[Tensor] | None = None,
        title: str = "",
    ) -> None:
        self._core = core_transfer
        self._timeout_s = timeout_s
        self._side = side
        self._target = target
        # What the core reads, and keeps until it has: this list itself.
        self._kept = kept
        # What the sender says that it runs; the message ends with it.
        self._title = title

    def wait(self) -> list[Tensor | None]:
        """Block until done; give the received tensors (none for a send), once.

        With tensors of a CUDA device, until all of it is enqueued there: the caller's current
        stream then waits for the rest, and the host does not.

        Received tensors own memory of the pool (torch's, if coded and not row-major) and are
        leaves with the sender's requires_grad and dense strides; None stands for a gradient that
        does not exist. On a device their memory is used again once the stream that is current in
        this call has done what it was given before the tensor died; a stream that reads them must
        be waited for by that one first.

        Raises LinkTimeoutError, PeerLostError, StageFailedError, MessageMismatchError or
        TransportError; ConfigError when the sender has another title. The GIL is released while
        waiting.
        """
        self._core.wait(self._timeout_s)
        parts = self._core.take(self._side.device, self._side.current_stream())
        if self._kept is not None:
            # Whoever keeps this object does not keep them.
            kept, self._kept = self._kept, []
            if self.is_done:  # on its device too, which may take longer
                kept.clear()
            return []
        if self._title:
            sent = to_tensor(parts.pop(), _CPU) if parts else None
            check_title(self._title, sent, self._core.peer)
        return [to_tensor(part, self._target) for part in parts]

    @property
    def is_done(self) -> bool:
        """On a device, too."""
        return self._core.is_done

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the tensors given to send."""
        return self._core.payload_nbytes - len(self._title.encode())

    @property
    def wire_nbytes(self) -> int:
        return self._core.wire_nbytes

    @property
    def posted_s(self) -> float:
        return self._core.posted_ns / 1e9

    @property
    def started_s(self) -> float:
        return self._core.started_ns / 1e9

    @property
    def done_s(self) -> float:
        return self._core.done_ns / 1e9
