"""pipecomm: the traffic inside pipeline-parallel training.

Importing it registers the torch.distributed backend "pipecomm" and the operators of
torch.ops.pipecomm.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pipecomm import errors, schedule
from pipecomm._version import __version__
from pipecomm.errors import *  # noqa: F403 - the error classes are public here

if TYPE_CHECKING:
    from pipecomm.codecs.codec import Codec
    from pipecomm.codecs.policy import CodecPolicy
    from pipecomm.drop_in.backend import BackendOptions
    from pipecomm.engine.microbatch import ForEveryMicrobatch
    from pipecomm.engine.pipeline import Pipeline
    from pipecomm.engine.updates import Updates
    from pipecomm.links.limits import FlowLimits
    from pipecomm.links.link import LinkEmulation
    from pipecomm.memory.pool import MemoryPool

__all__ = [
    "BackendOptions",
    "Codec",
    "CodecPolicy",
    "FlowLimits",
    "ForEveryMicrobatch",
    "LinkEmulation",
    "MemoryPool",
    "Pipeline",
    "Updates",
    "__version__",
    "errors",
    "schedule",
    *errors.__all__,
]

# Loaded when first used, so that schedules, the doctor and a useful error are available
# where torch or the extension is missing or broken.
_HOMES = {
    "BackendOptions": "drop_in.backend",
    "Codec": "codecs.codec",
    "CodecPolicy": "codecs.policy",
    "FlowLimits": "links.limits",
    "ForEveryMicrobatch": "engine.microbatch",
    "LinkEmulation": "links.link",
    "MemoryPool": "memory.pool",
    "Pipeline": "engine.pipeline",
    "Updates": "engine.updates",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipecomm' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"pipecomm.{_HOMES[name]}"), name)


def _register() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return
    try:
        from pipecomm.codecs import ops as codec_ops  # noqa: F401 - importing it registers the operators
        from pipecomm.drop_in.backend import register
    except (ImportError, OSError) as error:
        # The doctor must be able to tell what is wrong with it.
        warnings.warn(f"torch cannot be imported: {error}", RuntimeWarning, stacklevel=2)
        return
    register()


_register()
