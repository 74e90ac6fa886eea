"""Gives scripts that cannot be changed pipecomm where they ask for gloo (PIPECOMM_AUTOLOAD=1)."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pipecomm import settings

__all__ = ["is_wanted", "take_over_gloo"]

_log = logging.getLogger("pipecomm")


def is_wanted() -> bool:
    return settings.AUTOLOAD.text() == "1"


@functools.cache
def take_over_gloo() -> None:
    """From now on a process group whose CPU backend would be gloo gets pipecomm for it.

    That holds for groups asked for by name, per device, or by default; other devices keep their
    backend. dist.get_backend() still says what the script asked for, so that its decisions stay
    what they were; dist.get_backend_config() says what runs. Can be called again.
    """
    make_group = c10d._new_process_group_helper
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_group_with_pipecomm(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        call.arguments["backend"] = given = _replacement(asked)
        group, store = make_group(*call.args, **call.kwargs)
        if given != asked and group is not dist.GroupMember.NON_GROUP_MEMBER:
            c10d._world.pg_map[group] = (asked, store)
            if group.rank() == 0 and not call.arguments["global_ranks_in_group"]:
                _log.warning("PIPECOMM_AUTOLOAD=1: '%s' process groups are '%s'", asked, given)
        return group, store

    c10d._new_process_group_helper = make_group_with_pipecomm


def _replacement(backend: dist.Backend) -> dist.Backend:
    """The backend with pipecomm in gloo's place for the CPU; itself where gloo has none."""
    by_device = dict(dist.BackendConfig(backend).get_device_backend_map())
    if by_device.get("cpu") != dist.Backend.GLOO:
        return backend
    by_device["cpu"] = dist.Backend("pipecomm")
    # A plain name stands for every device that the backend knows, there or not.
    if ":" not in backend and not torch.accelerator.is_available():
        return by_device["cpu"]
    return dist.Backend(",".join(f"{device}:{name}" for device, name in by_device.items()))
