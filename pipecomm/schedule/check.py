"""Refuses a schedule that cannot be executed, and shows the place.

Two steps: what each list says (every action once, forward before backward, messages in the order
they are expected) and whether the lists together reach their end when no message can travel
before its receive is posted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import KINDS, Action, Kind
from pipecomm.schedule.core_lists import COMPUTE_KINDS, core_lists
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.lowering import with_communication
from pipecomm.schedule.placement import Hop, Placement
from pipecomm.schedule.ranks import Ranks, Row
from pipecomm.schedule.versions import check_versions
from pipecomm.schedule.walk import Progress, Stuck, Timing, Walk, walk

__all__ = ["check", "check_lists", "walk_or_explain"]

# Actions shown on each side of the marked one.
_CONTEXT = 6
# Ranks shown; more do not help to see who waits for whom.
_MAX_ROWS = 12


def check(schedule: ScheduleData, *, sends_block: bool = False) -> None:
    """Raise ConfigError if the lists are not what the schedule says or cannot be executed.

    With `sends_block` the order must work even if each send holds its rank until its receive is
    posted.
    """
    check_lists(schedule)
    walk_or_explain(schedule, Timing.none(schedule.num_stages, sends_block=sends_block))


def check_lists(schedule: ScheduleData) -> None:
    """Everything that can be seen without executing the lists. Raises ConfigError."""
    _check_each_action(schedule)
    _check_nothing_missing(schedule)
    _check_message_order(schedule)
    check_versions(schedule)


def walk_or_explain(
    schedule: ScheduleData, timing: Timing, progress: Progress | None = None
) -> Walk:
    """Walk a schedule; a deadlock becomes a ConfigError that shows who waits."""
    try:
        return walk(schedule, timing, progress)
    except Stuck as stuck:
        raise _deadlock(schedule, stuck.positions, timing) from None


def _check_each_action(schedule: ScheduleData) -> None:
    found = core_lists(schedule.ranks, None).find_fault(
        schedule.num_stages, schedule.num_microbatches
    )
    if found is None:
        return
    rule, index, other = found
    action = Row(schedule.ranks.actions)[index]
    compute = ", ".join(kind.value for kind in COMPUTE_KINDS)
    earlier = " or ".join(str(_same(action, kind)) for kind in action.kind.after)
    # In the order of the core's rules.
    expected = (
        f"compute only: {compute} (sends and receives are derived)",
        f"stages 0 to {schedule.num_stages - 1}",
        f"microbatches 0 to {schedule.num_microbatches - 1}",
        f"stage {action.stage} on one rank, and rank {other} has it",
        "each action once",
        f"no {action} after {_same(action, KINDS[other])}",
        f"{earlier} before {action}",
    )[rule]
    _refuse(schedule.ranks, index, expected)


def _check_nothing_missing(schedule: ScheduleData) -> None:
    counts = np.bincount(schedule.ranks.column("kind"), minlength=len(KINDS))
    begun, ended = (
        sum(int(counts[kind.index]) for kind in KINDS if kind.change_in_live == change)
        for change in (1, -1)
    )
    wanted = schedule.num_stages * schedule.num_microbatches
    num_missing = wanted - begun + (wanted - ended if schedule.has_backward else 0)
    if num_missing:
        # Not all of them: a mistyped microbatch number can make it billions.
        missing = itertools.islice(_missing(schedule), _MAX_ROWS)
        raise ConfigError(
            f"expected each of {schedule.num_microbatches} microbatches once on each of "
            f"{schedule.num_stages} stages; got {num_missing} missing: "
            f"{' '.join(map(str, missing))}{' ...' * (num_missing > _MAX_ROWS)}"
        )
    empty = np.flatnonzero(np.diff(schedule.ranks.offsets) == 0)
    if len(empty):
        raise ConfigError(f"expected actions on every rank; got none on rank {empty[0]}")


def _missing(schedule: ScheduleData) -> Iterator[Action]:
    seen = set(Row(schedule.ranks.actions))
    for kind in (Kind.F, Kind.B) if schedule.has_backward else (Kind.F,):
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                action = Action(kind, stage, microbatch)
                if _same(action, Kind.I) in seen and kind is Kind.B:
                    action = _same(action, Kind.W)
                if action not in seen:
                    yield action


def _check_message_order(schedule: ScheduleData) -> None:
    """A channel keeps order, so a rank must use its messages in the order they are made."""
    placement = schedule.placement
    found = core_lists(schedule.ranks, placement).find_misorder()
    if found is None:
        return
    index, sent_index, num_used = found
    sent = Row(schedule.ranks.actions)[sent_index]
    hop = _message_out(sent, placement)
    _refuse(
        schedule.ranks,
        index,
        f"microbatch {sent.microbatch}, as stage {sent.stage} (rank {hop.sender}) sends "
        f"it as message {num_used} to stage {hop.target}",
    )


def _message_out(action: Action, placement: Placement) -> Hop:
    hop = placement.hops_out[action.kind][action.stage]
    assert hop is not None
    return hop


def _same(action: Action, kind: Kind) -> Action:
    """The action of another kind on the same stage with the same microbatch."""
    return Action(kind, action.stage, action.microbatch)


def _refuse(ranks: Ranks, index: int, expected: str) -> NoReturn:
    """Marks the action at `index` of all."""
    rank, position = ranks.place_of(index)
    raise ConfigError(
        f"expected {expected}; got {ranks[rank][position]} "
        f"at position {position} of rank {rank}\n{_grid(ranks, {rank: position})}"
    )


def _deadlock(schedule: ScheduleData, positions: Mapping[int, int], timing: Timing) -> ConfigError:
    lowered = with_communication(schedule)
    stuck = {rank: lowered[rank][position] for rank, position in positions.items()}
    waits = [
        f"  rank {rank} at {action}, {_awaited(action, schedule.placement)}"
        for rank, action in itertools.islice(stuck.items(), _MAX_ROWS)
    ]
    return ConfigError(
        f"expected every rank to reach the end of its list; got a deadlock with {timing.slots} "
        f"slots{' and blocking sends' * timing.sends_block}: {len(stuck)} of {len(lowered)} "
        "ranks wait\n" + "\n".join(waits) + f"\n{_grid(lowered, positions)}\n"
        "reorder the marked actions so that what each one waits for comes before it"
    )


def _awaited(action: Action, placement: Placement) -> str:
    if action.kind.is_send:
        receiver = _message_out(action, placement).receiver
        return f"whose receive rank {receiver} has not posted"
    hop = placement.hops_in[action.kind][action.stage]
    if hop is None or not hop.is_message:
        return "whose input its own rank makes later"
    return f"whose input rank {hop.sender} has not sent"


def _grid(ranks: Ranks, marked: Mapping[int, int]) -> str:
    """The marked ranks and their neighbours, each around its marked action."""
    near = {rank + step for rank in marked for step in (-1, 0, 1)} & set(range(len(ranks)))
    rows = [_row(ranks[rank], rank, marked) for rank in sorted(near)[:_MAX_ROWS]]
    return "\n".join(rows)


def _row(actions: Row, rank: int, marked: Mapping[int, int]) -> str:
    center = marked.get(rank, next(iter(marked.values())))
    first, end = max(0, center - _CONTEXT), center + _CONTEXT + 1
    cells = [
        f"[{action}]" if marked.get(rank) == position else str(action)
        for position, action in enumerate(actions[first:end], first)
    ]
    before, after = ["..."] * (first > 0), ["..."] * (end < len(actions))
    mark = ["  <-- here"] * (rank in marked)
    return f"  rank {rank}: " + " ".join([*before, *cells, *after, *mark])
