"""Refuses a schedule that cannot be executed, and shows the place.

Two steps: what each list says (every action once, forward before backward, messages in the order
they are expected) and whether the lists together reach their end when no message can travel
before its receive is posted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Direction, Kind, Ranks
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.lowering import message_in, message_out, with_communication
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.walk import Stuck, Timing, Walk, walk

__all__ = ["check", "check_lists", "peak_activations", "walk_or_explain"]

# Actions shown on each side of the marked one.
_CONTEXT = 6
# Ranks shown; more do not help to see who waits for whom.
_MAX_ROWS = 12
_COMPUTE = [kind for kind in Kind if kind.is_compute]
# Kinds that make the same message: a stage runs one of them per microbatch.
_RIVALS = {
    kind: [
        other
        for other in _COMPUTE
        if other is not kind and kind.direction is not None and other.direction == kind.direction
    ]
    for kind in _COMPUTE
}


def check(schedule: ScheduleData, *, sends_block: bool = False) -> None:
    """Raise ConfigError if the lists are not what the schedule says or cannot be executed.

    With `sends_block` the order must work even if each send holds its rank until its receive is
    posted.
    """
    check_lists(schedule)
    nothing = [0.0] * schedule.num_stages
    no_time = Timing(
        compute_s=dict.fromkeys(_COMPUTE, nothing),
        transfer_s={"forward": nothing, "backward": nothing},
        latency_s=0.0,
        slots=0,
        sends_block=sends_block,
    )
    walk_or_explain(schedule, no_time)


def check_lists(schedule: ScheduleData) -> None:
    """Everything that can be seen without executing the lists. Raises ConfigError."""
    _check_each_action(schedule)
    _check_nothing_missing(schedule)
    _check_message_order(schedule.ranks, schedule.placement)


def peak_activations(schedule: ScheduleData) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations are kept at one time.

    From the forward to the end of the backward: W, where it is split.
    """
    live = [0] * schedule.num_stages
    peaks = [0] * schedule.num_stages
    for _, _, action in _walk_lists(schedule.ranks) if schedule.has_backward else ():
        live[action.stage] += action.kind.change_in_live
        peaks[action.stage] = max(peaks[action.stage], live[action.stage])
    return tuple(peaks)


def walk_or_explain(schedule: ScheduleData, timing: Timing) -> Walk:
    """Walk a schedule; a deadlock becomes a ConfigError that shows who waits."""
    try:
        return walk(schedule, timing)
    except Stuck as stuck:
        raise _deadlock(schedule, stuck.positions, timing) from None


def _check_each_action(schedule: ScheduleData) -> None:
    owners: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        seen: set[Action] = set()
        for position, action in enumerate(actions):
            expected = _wrong_size(action, schedule) or _wrong_order(action, seen)
            if owners.setdefault(action.stage, rank) != rank:
                expected = (
                    f"stage {action.stage} on one rank, and rank {owners[action.stage]} has it"
                )
            if expected:
                _refuser(schedule.ranks, rank, position)(expected)
            seen.add(action)


def _wrong_size(action: Action, schedule: ScheduleData) -> str | None:
    if not action.kind.is_compute:
        kinds = ", ".join(kind.value for kind in _COMPUTE)
        return f"compute only: {kinds} (sends and receives are derived)"
    if not 0 <= action.stage < schedule.num_stages:
        return f"stages 0 to {schedule.num_stages - 1}"
    if not 0 <= action.microbatch < schedule.num_microbatches:
        return f"microbatches 0 to {schedule.num_microbatches - 1}"
    return None


def _wrong_order(action: Action, seen: set[Action]) -> str | None:
    """What its own rank's list should have held up to a compute action; `seen` is what it held."""
    if action in seen:
        return "each action once"
    for rival in _RIVALS[action.kind]:
        if _same(action, rival) in seen:
            return f"no {action} after {_same(action, rival)}"
    after = action.kind.after
    if after is not None and _same(action, after) not in seen:
        return f"{_same(action, after)} before {action}"
    return None


def _check_nothing_missing(schedule: ScheduleData) -> None:
    counts = Counter(action.kind.change_in_live for _, _, action in _walk_lists(schedule.ranks))
    wanted = schedule.num_stages * schedule.num_microbatches
    num_missing = wanted - counts[1] + (wanted - counts[-1] if schedule.has_backward else 0)
    if num_missing:
        # Not all of them: a mistyped microbatch number can make it billions.
        missing = itertools.islice(_missing(schedule), _MAX_ROWS)
        raise ConfigError(
            f"expected each of {schedule.num_microbatches} microbatches once on each of "
            f"{schedule.num_stages} stages; got {num_missing} missing: "
            f"{' '.join(map(str, missing))}{' ...' * (num_missing > _MAX_ROWS)}"
        )
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise ConfigError(f"expected actions on every rank; got none on rank {rank}")


def _missing(schedule: ScheduleData) -> Iterator[Action]:
    seen = {action for actions in schedule.ranks for action in actions}
    for kind in (Kind.F, Kind.B) if schedule.has_backward else (Kind.F,):
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                action = Action(kind, stage, microbatch)
                if _same(action, Kind.I) in seen and kind is Kind.B:
                    action = _same(action, Kind.W)
                if action not in seen:
                    yield action


def _check_message_order(ranks: Ranks, placement: Placement) -> None:
    """A channel keeps order, so a rank must use its messages in the order they are made."""
    made: dict[tuple[Direction, int, int], list[Action]] = {}
    for _, _, action in _walk_lists(ranks):
        hop = message_out(action, placement)
        if hop is not None:
            made.setdefault(hop.channel, []).append(action)
    used: Counter[tuple[Direction, int, int]] = Counter()
    for rank, position, action in _walk_lists(ranks):
        hop = message_in(action, placement)
        if hop is None:
            continue
        index = used[hop.channel]
        used[hop.channel] += 1
        sent = made[hop.channel][index]
        if (sent.stage, sent.microbatch) != (hop.source, action.microbatch):
            sent_hop = message_out(sent, placement)
            assert sent_hop is not None
            _refuser(ranks, rank, position)(
                f"microbatch {sent.microbatch}, as stage {sent.stage} (rank {hop.sender}) sends "
                f"it as message {index} to stage {sent_hop.target}"
            )


def _walk_lists(ranks: Ranks) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(ranks):
        for position, action in enumerate(actions):
            yield rank, position, action


def _same(action: Action, kind: Kind) -> Action:
    """The action of another kind on the same stage with the same microbatch."""
    return Action(kind, action.stage, action.microbatch)


def _refuser(ranks: Ranks, rank: int, position: int) -> Callable[[str], NoReturn]:
    def refuse(expected: str) -> NoReturn:
        raise ConfigError(
            f"expected {expected}; got {ranks[rank][position]} "
            f"at position {position} of rank {rank}\n{_grid(ranks, {rank: position})}"
        )

    return refuse


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
        hop = message_out(action, placement)
        assert hop is not None
        return f"whose receive rank {hop.receiver} has not posted"
    hop = message_in(action, placement)
    if hop is None:
        return "whose input its own rank makes later"
    return f"whose input rank {hop.sender} has not sent"


def _grid(ranks: Ranks, marked: Mapping[int, int]) -> str:
    """The marked ranks and their neighbours, each around its marked action."""
    near = {rank + step for rank in marked for step in (-1, 0, 1)} & set(range(len(ranks)))
    rows = [_row(ranks[rank], rank, marked) for rank in sorted(near)[:_MAX_ROWS]]
    return "\n".join(rows)


def _row(actions: tuple[Action, ...], rank: int, marked: Mapping[int, int]) -> str:
    center = marked.get(rank, next(iter(marked.values())))
    first, end = max(0, center - _CONTEXT), center + _CONTEXT + 1
    cells = [
        f"[{action}]" if marked.get(rank) == position else str(action)
        for position, action in enumerate(actions[first:end], first)
    ]
    before, after = ["..."] * (first > 0), ["..."] * (end < len(actions))
    mark = ["  <-- here"] * (rank in marked)
    return f"  rank {rank}: " + " ".join([*before, *cells, *after, *mark])
