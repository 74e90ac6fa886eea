"""How far the host may be ahead of a device."""

from __future__ import annotations

from collections import deque

import torch

__all__ = ["Pace"]


class Pace:
    """Holds the host up when it is more than `most_ahead` pieces of work ahead of `device`.

    The device has yet to read what such work was given, so that no memory comes free: without a
    bound it would grow with the number of microbatches. On the CPU nothing is ever ahead.
    """

    def __init__(self, device: torch.device, most_ahead: int) -> None:
        self._device = device
        self._most_ahead = most_ahead
        self._ends: deque[torch.cuda.Event] = deque()

    def add(self) -> None:
        """A piece of work has been enqueued on the current stream."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > self._most_ahead:
            self._ends.popleft().synchronize()
