"""Which way a result goes through the stages; all parts of the package mean the same by it."""

from __future__ import annotations

from typing import Literal

__all__ = ["OPPOSITE", "Direction"]

# Activations go forward, to the stage after; their gradients backward, to the stage before.
Direction = Literal["forward", "backward"]

OPPOSITE: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}
