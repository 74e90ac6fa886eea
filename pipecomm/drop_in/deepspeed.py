"""Takes the place of deepspeed.runtime.pipe.p2p where a job cannot change its backend's name.

Only the five functions that DeepSpeed's pipeline engine calls. Nothing of DeepSpeed is imported
before install() is called.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from pipecomm.drop_in.backend import BackendOptions, connect_beside
from pipecomm.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["can_send_recv", "init_process_groups", "install", "recv", "send", "wait"]


class Grid(Protocol):
    """The part of DeepSpeed's PipelineParallelGrid that is used."""

    def stage_to_global(self, stage_id: int) -> int: ...
    def get_pipe_parallel_group(self) -> dist.ProcessGroup: ...


@dataclass
class _State:
    """Of this process, as in the module that is replaced."""

    options: BackendOptions | None = None
    is_overlapped: bool = False
    grid: Grid | None = None
    connection: Any = None
    pending: deque[dist.Work] = field(default_factory=deque)


_state = _State()


def install(options: BackendOptions | None = None, *, overlap_sends: bool = False) -> None:
    """Have DeepSpeed's pipeline engine send and receive through pipecomm.

    Call it on all ranks before deepspeed.initialize(). With `overlap_sends`, send() returns at
    once: DeepSpeed must not write to a tensor that it has sent, and as of 0.19 it does not.
    Raises ImportError where deepspeed is not installed.
    """
    _state.options, _state.is_overlapped = options, overlap_sends
    replaced = import_module("deepspeed.runtime.pipe.p2p")
    for function in (can_send_recv, init_process_groups, recv, send, wait):
        setattr(replaced, function.__name__, function)


def can_send_recv() -> bool:
    """Always: nothing has to be emulated by broadcasts."""
    return True


def init_process_groups(grid: Grid) -> None:
    """Connect the ranks of this rank's pipeline; all of them call it."""
    _state.grid = grid
    _state.connection = connect_beside(grid.get_pipe_parallel_group(), _state.options)


def send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
    """Send to a stage of this pipeline; returns when the tensor has left, or at once."""
    _transfer("send", tensor, dest_stage, async_op or _state.is_overlapped)
    while _state.pending and _state.pending[0].is_completed():
        _state.pending.popleft().wait()


def recv(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
    """Receive from a stage of this pipeline; returns when the data is there, or at once."""
    _transfer("recv", tensor, src_stage, async_op)


def wait() -> None:
    """Wait for every send and receive that returned at once."""
    while _state.pending:
        _state.pending.popleft().wait()


def _transfer(what: str, tensor: torch.Tensor, stage: int, is_later: bool) -> None:
    """Start a transfer, and wait for it or leave that to later."""
    grid, connection = _state.grid, _state.connection
    if grid is None:
        raise ConfigError(
            "expected init_process_groups(grid) before the first send or receive; got none"
        )
    peer = dist.get_group_rank(grid.get_pipe_parallel_group(), grid.stage_to_global(stage_id=stage))
    work = getattr(connection, what)([tensor], peer, 0)
    if is_later:
        _state.pending.append(work)
    else:
        work.wait()
