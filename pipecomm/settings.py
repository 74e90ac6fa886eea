"""Every environment variable that this package's Python reads: its name, default, check, meaning.

Nothing else in the package looks at the environment. Values are read when they are asked for: a
program may set them until then. docs/settings.md is the list for users, with what C++ reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipecomm.errors import ConfigError

__all__ = ["ALL", "Setting", "environment"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting(Generic[_T]):
    """One variable. `expected`: its values in words; `default`: its value where it is not set."""

    name: str
    parse: Callable[[str], _T]
    expected: str
    default: _T
    meaning: str

    def text(self) -> str | None:
        """As it is set; None where it is not, or empty."""
        return os.environ.get(self.name) or None

    def value(self) -> _T:
        """What it is set to, or the default. Raises ConfigError for a text that is no value."""
        text = self.text()
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"expected {self.expected} in {self.name}; got {text!r}") from None


def environment() -> dict[str, str]:
    """All variables of this process, to hand on to another one."""
    return dict(os.environ)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


_NUMBER, _FLAG, _TEXT = "a whole number", "0 or 1", "text"

# Links.
MAX_INFLIGHT = Setting(
    "PIPECOMM_MAX_INFLIGHT", _whole, _NUMBER, 0,
    "messages that a peer has not taken yet, on each link; 0: as many as fit",
)  # fmt: skip
MAX_INFLIGHT_NBYTES = Setting(
    "PIPECOMM_MAX_INFLIGHT_NBYTES", _whole, _NUMBER, 4 << 20,
    "their bytes: the size of a link's ring, a multiple of 1 MiB",
)  # fmt: skip
MAX_PROCESS_INFLIGHT = Setting(
    "PIPECOMM_MAX_PROCESS_INFLIGHT", _whole, _NUMBER, 0,
    "messages from this process that are not taken yet, over all links and groups; 0: no limit",
)  # fmt: skip
MAX_PROCESS_INFLIGHT_NBYTES = Setting(
    "PIPECOMM_MAX_PROCESS_INFLIGHT_NBYTES", _whole, _NUMBER, 0, "their bytes; 0: no limit"
)
STRICT = Setting(
    "PIPECOMM_STRICT", _flag, _FLAG, False, "1: a send is done only when its receive is posted"
)
SOCKET_IFNAME: Setting[tuple[str, ...]] = Setting(
    "PIPECOMM_SOCKET_IFNAME", _names, "interfaces, such as eth0,eth1", (),
    "at which ranks on other hosts call this one: the first with an address; not set: as "
    "GLOO_SOCKET_IFNAME",
)  # fmt: skip
GLOO_SOCKET_IFNAME: Setting[tuple[str, ...]] = Setting(
    "GLOO_SOCKET_IFNAME", _names, "interfaces, such as eth0,eth1", (),
    "the same for gloo's collectives; not set: the one that leads to MASTER_ADDR",
)  # fmt: skip
STAND_IN_DEVICE = Setting(
    "PIPECOMM_STAND_IN_DEVICE", _flag, _FLAG, False,
    "for tests; 1: tensors of the host cross as those of a GPU do, in slots, by streams that are "
    "threads",
)  # fmt: skip
STAND_IN_LAG_US = Setting(
    "PIPECOMM_STAND_IN_LAG_US", _whole, _NUMBER, 0,
    "for tests; microseconds by which those streams lag, so that what does not wait for them shows",
)  # fmt: skip

# The torch.distributed backend.
CODEC = Setting(
    "PIPECOMM_CODEC", str, "a codec, such as int4", "raw", "of messages to higher ranks"
)
GRAD_CODEC = Setting(
    "PIPECOMM_GRAD_CODEC", str, "a codec, such as int8", "raw", "of messages to lower ranks"
)
# Its default is that of the engine and of a link too. Coding 4 KiB gains on a link of less than
# 1.4 to 4 GB/s, as slow as "auto" takes a codec for; coding 1 KiB, of less than 0.5 to 1 GB/s
# (benchmarks/small_messages.py).
MIN_NBYTES = Setting(
    "PIPECOMM_MIN_NBYTES", _whole, "a number of bytes", 4096, "smaller tensors stay as they are"
)
AUTOLOAD = Setting(
    "PIPECOMM_AUTOLOAD", _flag, _FLAG, False, "1: pipecomm takes gloo's place, at `import torch`"
)
XDG_CACHE_HOME = Setting(
    "XDG_CACHE_HOME", str, "a folder", "",
    "where a torch half that is built at first use is kept; not set: ~/.cache",
)  # fmt: skip
CXX = Setting(
    "CXX", str, "a command", "",
    "the C++ compiler that builds it; not set: the first of c++, g++, clang++ that works",
)  # fmt: skip

# A rank of a job, from torchrun or our launcher.
RANK = Setting("RANK", _whole, _NUMBER, 0, "this rank")
WORLD_SIZE = Setting("WORLD_SIZE", _whole, _NUMBER, 1, "the number of ranks")
MASTER_ADDR = Setting("MASTER_ADDR", str, "a host", "", "where the ranks meet")
MASTER_PORT = Setting("MASTER_PORT", _whole, "a port", 0, "where the ranks meet")
OMP_NUM_THREADS = Setting(
    "OMP_NUM_THREADS", _whole, _NUMBER, 1, "threads that compute in a rank of `pipecomm train`"
)
LAUNCHER_PID = Setting(
    "PIPECOMM_LAUNCHER_PID", _whole, "a process id", 0,
    "set by `pipecomm train` for its ranks: whose child they are",
)  # fmt: skip
EVENT_FD = Setting(
    "PIPECOMM_EVENT_FD", _whole, "a descriptor", 0,
    "set by `pipecomm train` for its ranks: where they report",
)  # fmt: skip

#: All of them, by name.
ALL = {item.name: item for item in list(globals().values()) if isinstance(item, Setting)}
