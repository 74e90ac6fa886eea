"""Names what a rank does in a profile: records of torch.profiler, NVTX ranges on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

__all__ = ["Marks"]

_NOTHING = nullcontext()


class Marks:
    """For work on `device`. Where nobody looks, a mark costs a fraction of a microsecond."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"

    def of(self, name: object) -> AbstractContextManager[object]:
        """The block has the name that `name` prints as.

        Under torch.autograd.profiler.emit_nvtx() a record becomes the NVTX range; without any
        profiler of torch a GPU's work gets a range, which tools from outside see.
        """
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return record_function(str(name))
        if self._is_on_gpu:
            return torch.cuda.nvtx.range(str(name))
        return _NOTHING
