"""What a step gives back on one rank."""

from __future__ import annotations

import functools
from typing import Any

from pipecomm.engine.record import Record
from pipecomm.engine.stats import StepStats

__all__ = ["StepResult"]


class StepResult:
    """`loss` and `outputs` (a list, one per microbatch, detached) exist where the last stage is.

    `stats`: what this rank has done, and how long it took; worked out when first asked for.
    """

    def __init__(self, loss: float | None, outputs: list[Any] | None, record: Record) -> None:
        self.loss = loss
        self.outputs = outputs
        self._record: Record | None = record

    @functools.cached_property
    def stats(self) -> StepStats:
        assert self._record is not None
        stats = self._record.stats()
        # With it go the transfers that it names.
        self._record = None
        return stats

    def __getstate__(self) -> dict[str, Any]:
        # To another process the numbers go, not the transfers.
        return {"loss": self.loss, "outputs": self.outputs, "stats": self.stats, "_record": None}

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss!r}, stats={self.stats!r})"
