"""ZB-V (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): no bubble between actions.

>>> print(build("zb-v", 4, 3).draw())
slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2   .
rank 1   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

Two stages per rank, placed in a V: the last stage is on the first rank, whose backwards can begin
as soon as the first microbatch has come down and up again. With equal F, I and W each rank idles
only until its first action, and after its last: (P-1) times one of them. Activations are those of
1F1B's first rank; messages are twice as many.
"""

from __future__ import annotations

from pipecomm.schedule.action import Kind
from pipecomm.schedule.builders.rows import Row, Turns
from pipecomm.schedule.placement import Placement

__all__ = ["row"]


def row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    """The list of a rank that holds stage k and 2P-1-k.

    Below 2P-1 microbatches it is that of 2P-1 with the others left out.
    """
    down, up = placement.stages_of(rank)
    num_below = placement.num_ranks - rank
    turns = Turns()
    _warm_up(turns, down, up, num_before=rank, num_below=num_below)
    num_forwards = max(num_microbatches, 2 * placement.num_ranks - 1)
    while turns.count(Kind.F, up) < num_forwards:
        if turns.count(Kind.F, down) < num_forwards:
            turns.add(Kind.F, down)
        for kind, stage in _STEADY:
            turns.add(kind, (down, up)[stage])
    for _ in range(rank):
        turns.add(Kind.I, down)
        turns.add(Kind.I, up)
    for _ in range(num_below):
        turns.add(Kind.I, down)
        turns.add(Kind.W, down)
    for stage in (up, down):
        while turns.count(Kind.W, stage) < turns.count(Kind.I, stage):
            turns.add(Kind.W, stage)
    return turns.row(num_microbatches)


# After the forward of the stage going down, 0; 1 is the one going up.
_STEADY = ((Kind.I, 0), (Kind.W, 0), (Kind.F, 1), (Kind.I, 1), (Kind.W, 1))


def _warm_up(turns: Turns, down: int, up: int, *, num_before: int, num_below: int) -> None:
    for _ in range(2 * num_below - 1):
        turns.add(Kind.F, down)
    for _ in range(num_before):
        turns.add(Kind.F, up)
        turns.add(Kind.F, down)
    for _ in range(num_below):
        for kind in (Kind.F, Kind.I, Kind.W):
            turns.add(kind, up)
