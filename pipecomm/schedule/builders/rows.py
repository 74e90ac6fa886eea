"""What the files of the named schedules share: rows of actions, and 1F1B's three phases."""

from __future__ import annotations

from collections.abc import Sequence

from pipecomm.schedule.action import Action, Kind

__all__ = ["Row", "alternating", "of_each"]

# The list of one rank.
Row = Sequence[Action]


def of_each(kind: Kind, stage: int, num_microbatches: int) -> Row:
    """One action for each microbatch, in order."""
    return [Action(kind, stage, microbatch) for microbatch in range(num_microbatches)]


def alternating(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """Warmup forwards, then one forward and one backward in turn, then the cooldown backwards."""
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    pairs = zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:num_warmup], *steady, *backwards[num_steady:]]
