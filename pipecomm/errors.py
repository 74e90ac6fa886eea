"""Every error pipecomm raises: what was expected, what came, where, and what to do.

All derive from PipecommError, which is a RuntimeError so that code written for
torch.distributed keeps working, and from the builtin class a caller would expect.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CudaError",
    "LinkTimeoutError",
    "MessageMismatchError",
    "NotBuiltError",
    "PeerLostError",
    "PipecommError",
    "PoolExhaustedError",
    "StageFailedError",
    "TensorError",
    "TransportError",
]


class PipecommError(RuntimeError):
    """Base of all errors raised by pipecomm."""


class ConfigError(PipecommError, ValueError):
    """A name, number or combination of settings that cannot work."""


class TensorError(PipecommError, ValueError, TypeError):
    """A tensor whose class, dtype, shape, layout or device cannot be used here."""


class NotBuiltError(PipecommError, NotImplementedError):
    """This installation was built without the part that is needed."""


class PoolExhaustedError(PipecommError, MemoryError):
    """The memory pool's limit, the machine's memory or a limit of the process does not allow it."""


class MessageMismatchError(PipecommError):
    """A message arrived whose dtype, shape or size is not what the receiver asked for."""


class TransportError(PipecommError, ConnectionError):
    """A connection could not be made or used."""


class PeerLostError(TransportError):
    """The process at the other end is gone."""


class LinkTimeoutError(PipecommError, TimeoutError):
    """A transfer did not finish in the time given to it."""


class StageFailedError(PipecommError):
    """Another rank gave up this step; the text is that rank's error."""


class CudaError(PipecommError):
    """A CUDA call failed."""
