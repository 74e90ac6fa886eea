"""Refuses a schedule that cannot be executed, and shows the place.

Two steps: what each list says (every action once, forward before backward, messages in the order
they are expected) and whether the lists together reach their end when no message can travel
before its receive is posted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Kind, Ranks
from pipecomm.schedule.lowering import add_communication, receive_for, sender_of, stage_owners
from pipecomm.schedule.walk import Stuck, Timing, Walk, walk

__all__ = ["check", "check_lists", "peak_activations", "walk_or_explain"]

# Actions shown on each side of the marked one.
_CONTEXT = 6
# Ranks shown; more do not help to see who waits for whom.
_MAX_ROWS = 12


def check(ranks: Ranks, num_stages: int, num_microbatches: int, sends_block: bool) -> None:
    """Raise ConfigError if the lists are not a schedule of `num_stages` x `num_microbatches`.

    With `sends_block` the order must work even if each send holds its rank until its receive is
    posted.
    """
    check_lists(ranks, num_stages, num_microbatches)
    no_time = Timing(lambda _: 0.0, lambda _: 0.0, 0.0, slots=0, sends_block=sends_block)
    walk_or_explain(ranks, no_time)


def check_lists(ranks: Ranks, num_stages: int, num_microbatches: int) -> None:
    """Everything that can be seen without executing the lists. Raises ConfigError."""
    _check_each_action(ranks, num_stages, num_microbatches)
    _check_nothing_missing(ranks, num_stages, num_microbatches)
    _check_message_order(ranks)


def peak_activations(ranks: Ranks) -> dict[int, int]:
    """Per stage, the most microbatches whose forward is done and whose backward is not."""
    live: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for _, _, action in _walk_lists(ranks):
        change = 1 if action.kind is Kind.F else -1
        live[action.stage] = live.get(action.stage, 0) + change
        peaks[action.stage] = max(peaks.get(action.stage, 0), live[action.stage])
    return peaks


def walk_or_explain(ranks: Ranks, timing: Timing) -> Walk:
    """Lower and walk compute lists; a deadlock becomes a ConfigError that shows who waits."""
    lowered = add_communication(ranks)
    try:
        return walk(lowered, timing)
    except Stuck as stuck:
        raise _deadlock(lowered, stuck.positions, timing) from None


def _check_each_action(ranks: Ranks, num_stages: int, num_microbatches: int) -> None:
    owners: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, position, action in _walk_lists(ranks):
        refuse = _refuser(ranks, rank, position)
        if not action.kind.is_compute:
            refuse("F and B only (sends and receives are derived)")
        if not 0 <= action.stage < num_stages:
            refuse(f"stages 0 to {num_stages - 1}")
        if not 0 <= action.microbatch < num_microbatches:
            refuse(f"microbatches 0 to {num_microbatches - 1}")
        if owners.setdefault(action.stage, rank) != rank:
            refuse(f"stage {action.stage} on one rank, and rank {owners[action.stage]} has it")
        if action in seen:
            refuse("each action once")
        if action.kind is Kind.B and _twin(action) not in seen:
            refuse(f"{_twin(action)} before {action}")
        seen.add(action)


def _check_nothing_missing(ranks: Ranks, num_stages: int, num_microbatches: int) -> None:
    seen = {action for actions in ranks for action in actions}
    has_backward = any(action.kind is Kind.B for action in seen)
    kinds = (Kind.F, Kind.B) if has_backward else (Kind.F,)
    wanted = (
        Action(kind, stage, microbatch)
        for kind in kinds
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
    )
    num_missing = len(kinds) * num_stages * num_microbatches - len(seen)
    if num_missing:
        # Not all of them: a mistyped microbatch number can make it billions.
        missing = itertools.islice((a for a in wanted if a not in seen), _MAX_ROWS)
        raise ConfigError(
            f"expected each of {num_microbatches} microbatches once on each of {num_stages} "
            f"stages; got {num_missing} missing: {' '.join(map(str, missing))}"
            f"{' ...' * (num_missing > _MAX_ROWS)}"
        )
    for rank, actions in enumerate(ranks):
        if not actions:
            raise ConfigError(f"expected actions on every rank; got none on rank {rank}")


def _check_message_order(ranks: Ranks) -> None:
    """A channel keeps order, so a stage must use messages in the order they are made."""
    owners = stage_owners(ranks)
    made: dict[tuple[Kind, int], list[int]] = {}
    for _, _, action in _walk_lists(ranks):
        made.setdefault((action.kind, action.stage), []).append(action.microbatch)
    used: dict[tuple[Kind, int], int] = {}
    for rank, position, action in _walk_lists(ranks):
        receive = receive_for(action, owners)
        if receive is None:
            continue
        channel = (action.kind, action.stage)
        index = used[channel] = used.get(channel, -1) + 1
        sender = sender_of(receive)
        sent = made[action.kind, sender][index]
        if sent != action.microbatch:
            refuse = _refuser(ranks, rank, position)
            refuse(
                f"microbatch {sent}, as stage {sender} (rank {owners[sender]}) sends it as "
                f"message {index} to stage {action.stage}"
            )


def _walk_lists(ranks: Ranks) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(ranks):
        for position, action in enumerate(actions):
            yield rank, position, action


def _twin(action: Action) -> Action:
    return Action(Kind.F, action.stage, action.microbatch)


def _refuser(ranks: Ranks, rank: int, position: int) -> Callable[[str], NoReturn]:
    def refuse(expected: str) -> NoReturn:
        raise ConfigError(
            f"expected {expected}; got {ranks[rank][position]} "
            f"at position {position} of rank {rank}\n{_grid(ranks, {rank: position})}"
        )

    return refuse


def _deadlock(lowered: Ranks, positions: Mapping[int, int], timing: Timing) -> ConfigError:
    owners = stage_owners(lowered)
    stuck = {rank: lowered[rank][position] for rank, position in positions.items()}
    waits = [
        f"  rank {rank} at {action}, {_awaited(action, owners)}"
        for rank, action in itertools.islice(stuck.items(), _MAX_ROWS)
    ]
    return ConfigError(
        f"expected every rank to reach the end of its list; got a deadlock with {timing.slots} "
        f"slots{' and blocking sends' * timing.sends_block}: {len(stuck)} of {len(lowered)} "
        "ranks wait\n" + "\n".join(waits) + f"\n{_grid(lowered, positions)}\n"
        "reorder the marked actions so that what each one waits for comes before it"
    )


def _awaited(action: Action, owners: Mapping[int, int]) -> str:
    if action.kind in (Kind.SEND_F, Kind.SEND_B):
        target = action.stage + (1 if action.kind is Kind.SEND_F else -1)
        return f"whose receive rank {owners[target]} has not posted"
    receive = receive_for(action, owners)
    if receive is None:
        return "whose input its own rank makes later"
    return f"whose input rank {owners[sender_of(receive)]} has not sent"


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
