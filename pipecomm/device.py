"""Where a stage's tensors lie, and how far the host runs ahead of a device."""

from __future__ import annotations

import itertools
from collections import deque

import torch
from torch import nn

from pipecomm.errors import ConfigError

__all__ = ["Pace", "as_device", "device_of"]


def as_device(spec: torch.device | str) -> torch.device:
    """The device a user named; ConfigError for what torch does not know."""
    try:
        return torch.device(spec)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"expected a device, such as 'cpu'; got {spec!r}") from error


def device_of(module: nn.Module) -> torch.device:
    """That of the first parameter or buffer; torch's default device where there is none."""
    held = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.get_default_device() if held is None else held.device


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
