"""Names of devices, and where a module's tensors lie."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from pipecomm.errors import ConfigError

__all__ = ["as_device", "device_of"]


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
