"""How much may be on its way to a peer or from a process, and whether sends wait for receives."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipecomm import settings
from pipecomm.errors import ConfigError

__all__ = ["FlowLimits"]

_MIB = 1 << 20
_MAX = (1 << 40) // _MIB * _MIB


@dataclass(frozen=True)
class FlowLimits:
    """What each link of a process group takes before its sender has to wait.

    Equal on all ranks, except the two of the process.

    Attributes:
        max_inflight: messages that have left a rank and that its peer has not taken; 0 = as many
            as fit. Default: PIPECOMM_MAX_INFLIGHT or 0.
        max_inflight_nbytes: bytes of them (a multiple of 1 MiB): what a link's ring holds.
            Default: PIPECOMM_MAX_INFLIGHT_NBYTES or 4 MiB.
        max_process_inflight: the same over all links and groups of the process: at this many, a
            link that has something on its way begins no new message. 0 = no limit. Default:
            PIPECOMM_MAX_PROCESS_INFLIGHT or 0.
        max_process_inflight_nbytes: likewise bytes, any number; 0 = no limit. Default:
            PIPECOMM_MAX_PROCESS_INFLIGHT_NBYTES or 0.
        strict: a send is done only when its receive is posted, at any size. For tests: an order
            of sends and receives that works only because small messages are eager then times
            out, always. Default: PIPECOMM_STRICT=1 or False.

    Raises ConfigError for a number that makes no sense.
    """

    max_inflight: int = field(default_factory=settings.MAX_INFLIGHT.value)
    max_inflight_nbytes: int = field(default_factory=settings.MAX_INFLIGHT_NBYTES.value)
    strict: bool = field(default_factory=settings.STRICT.value)
    max_process_inflight: int = field(default_factory=settings.MAX_PROCESS_INFLIGHT.value)
    max_process_inflight_nbytes: int = field(
        default_factory=settings.MAX_PROCESS_INFLIGHT_NBYTES.value
    )

    def __post_init__(self) -> None:
        for name in (
            "max_inflight",
            "max_inflight_nbytes",
            "max_process_inflight",
            "max_process_inflight_nbytes",
        ):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MAX:
                raise ConfigError(f"expected {name} from 0 to {_MAX}; got {value!r}")
        if self.max_inflight_nbytes % _MIB or self.max_inflight_nbytes == 0:
            raise ConfigError(
                f"expected max_inflight_nbytes as a multiple of {_MIB}; got "
                f"{self.max_inflight_nbytes}"
            )
        if type(self.strict) is not bool:
            raise ConfigError(f"expected strict as True or False; got {self.strict!r}")

    @property
    def settings(self) -> str:
        """What both ends of a link must agree on, as text."""
        return (
            f"max_inflight={self.max_inflight} max_inflight_nbytes={self.max_inflight_nbytes} "
            f"strict={self.strict}"
        )
