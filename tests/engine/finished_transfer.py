"""A transfer that is over, as the numbers of a step see it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FinishedTransfer"]


@dataclass
class FinishedTransfer:
    started_s: float
    done_s: float
    payload_nbytes: int = 100
    wire_nbytes: int = 40
