"""DualPipeV (DeepSeek, DualPipe, 2025): forwards and backwards in pairs that can overlap.

>>> print(build("dualpipe-v", 4, 4).draw())
slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3   . 0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
rank 1   . 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3

Two stages per rank, placed in a V. In the steady phase each forward of one stage stands next to a
backward of the other, for an engine that runs the two at once; here they follow one another.
Backwards are split only where the bubble is: at the turn of the warmup and in the cooldown.
"""  # noqa: E501

from __future__ import annotations

from collections import deque

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, Turns
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds stage k and 2P-1-k. It takes 2P microbatches or more."""
    if num_microbatches < placement.num_stages:
        raise ConfigError(
            f"expected at least as many microbatches as stages; got {num_microbatches} for "
            f"{placement.num_stages}; {placement.num_stages} and more are possible"
        )
    down, up = placement.stages_of(rank)
    num_after = placement.num_ranks - rank - 1
    writer = _Writer()
    writer.repeat(2 * num_after, (Kind.F, down))
    writer.repeat(rank + 1, (Kind.F, down), (Kind.F, up))
    writer.repeat(num_after, (Kind.I, up), (Kind.W, up), (Kind.F, up))
    writer.repeat(
        num_microbatches - placement.num_stages + rank + 1,
        *((Kind.F, down), (Kind.B, up), (Kind.F, up), (Kind.B, down)),
    )
    writer.repeat(num_after, (Kind.B, up), (Kind.F, up), (Kind.B, down))
    # The second half of what is left, counted in single backwards, is split.
    for number in range(rank + 1):
        for side, stage in enumerate((up, down)):
            is_split = 2 * number + side > rank
            writer.repeat(1, (Kind.I if is_split else Kind.B, stage))
    writer.repeat(num_after, (Kind.W, down), (Kind.I, down))
    writer.repeat(rank + 1, (Kind.W, down))
    return writer.turns.row(num_microbatches)


class _Writer:
    """Writes W for the oldest I that waits for one, of whichever stage."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._waiting: deque[int] = deque()

    def repeat(self, times: int, *actions: tuple[Kind, int]) -> None:
        for _ in range(times):
            for kind, stage in actions:
                if kind is Kind.I:
                    self._waiting.append(stage)
                self.turns.add(kind, self._waiting.popleft() if kind is Kind.W else stage)
