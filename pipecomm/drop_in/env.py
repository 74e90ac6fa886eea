"""Has init_process_group("pipecomm") name all that is wrong with its environment, and at once.

torch names one missing variable at a time, and waits its whole timeout where RANK is too high.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlparse

from pipecomm import settings
from pipecomm.errors import ConfigError

__all__ = ["check_environment", "check_first"]

_MAX_PORT = 65535


@functools.cache
def check_first(is_ours: Callable[[str], bool]) -> None:
    """From now on env:// checks before it connects where init_process_group was asked for a
    backend that `is_ours`; for any other it does what it did. A torch that keeps its handlers
    elsewhere stays as it is.
    """
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    connect = handlers.get("env")
    if connect is None:
        return

    @functools.wraps(connect)
    def check_and_connect(url: str, *args: Any, **kwargs: Any) -> Any:
        if is_ours(_asked_backend()):
            check_environment(url)
        return connect(url, *args, **kwargs)

    handlers["env"] = check_and_connect


def _asked_backend() -> str:
    """The backend of the init_process_group that this call comes from, which torch tells no
    handler; "" for a call from elsewhere.
    """
    asks = inspect.unwrap(import_module("torch.distributed").init_process_group).__code__
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code is not asks:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_locals.get("backend"))


def check_environment(url: str) -> None:
    """Raise ConfigError unless url and environment say which rank of how many this is, and where.

    `url` is torch's: "env://", with "?rank=0&world_size=2" for what init_process_group was given.
    """
    given = dict(parse_qsl(urlparse(url).query))
    rank, rank_problem = _number(settings.RANK, given.get("rank"))
    size, size_problem = _number(settings.WORLD_SIZE, given.get("world_size"))
    port, port_problem = _number(settings.MASTER_PORT)
    problems = [rank_problem, size_problem]
    if rank is not None and size is not None and not 0 <= rank < size:
        problems.append(f"RANK={rank} is not below WORLD_SIZE={size}")
    problems.append("" if settings.MASTER_ADDR.text() else "no MASTER_ADDR")
    problems.append(port_problem)
    if port is not None and not 0 <= port <= _MAX_PORT:
        problems.append(f"MASTER_PORT={port} is no port")
    if any(problems):
        raise ConfigError(
            f"expected the environment of one rank out of several; got: "
            f"{', '.join(filter(None, problems))}; start the ranks with torchrun, or a single one "
            "with RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
        )


def _number(setting: settings.Setting[int], given: str | None = None) -> tuple[int | None, str]:
    """Its value if it is a number, and what is wrong with it if not."""
    text = given or setting.text()
    if not text:
        return None, f"no {setting.name}"
    try:
        return int(text), ""
    except ValueError:
        return None, f"{setting.name}={text!r} is no number"
