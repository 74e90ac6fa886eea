"""Whether lists are a schedule, said a second time and another way: by a graph without a clock.

Knows the letters of the kinds, and none of the traits, hops and channels that it is to judge.
"""

from __future__ import annotations

import graphlib

from pipecomm.schedule import Action, Kind, Schedule, with_communication

__all__ = ["is_possible"]

# Letter -> where its result goes, and the letters whose result it waits for there.
_STEP = {"F": 1, "B": -1, "I": -1, "W": 0}
_FED_BY = {"F": "F", "B": "BI", "I": "BI", "W": ""}
# Letter -> the letter that must stand before it.
_AFTER = {"B": "F", "I": "F", "W": "I"}

_Message = tuple[int, int]


def is_possible(schedule: Schedule, *, sends_block: bool = False) -> bool:
    """For lists that hold every action once, each stage on one rank."""
    return (
        _keeps_own_order(schedule)
        and _keeps_message_order(schedule)
        and _has_no_deadlock(schedule, sends_block)
    )


def _keeps_own_order(schedule: Schedule) -> bool:
    return all(
        row.index(action._replace(kind=Kind[_AFTER[action.kind.name]])) < row.index(action)
        for row in schedule.ranks
        for action in row
        if action.kind.name in _AFTER
    )


def _keeps_message_order(schedule: Schedule) -> bool:
    """Whether each rank uses what another sends it, by direction, in the order of sending."""
    rank_of = {action.stage: rank for rank, row in enumerate(schedule.ranks) for action in row}
    sent: dict[tuple[int, int, int], list[_Message]] = {}
    used: dict[tuple[int, int, int], list[_Message]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            step = _STEP[action.kind.name]
            target = rank_of.get(action.stage + step, rank)
            source = rank_of.get(action.stage - step, rank)
            # A message is named by the stage that sends it, and its microbatch.
            if target != rank:
                message = (action.stage, action.microbatch)
                sent.setdefault((step, rank, target), []).append(message)
            if source != rank:
                message = (action.stage - step, action.microbatch)
                used.setdefault((step, source, rank), []).append(message)
    return sent == used


def _has_no_deadlock(schedule: Schedule, sends_block: bool) -> bool:
    """Is the graph of 'must come before' over the lowered lists free of cycles?"""
    lowered = with_communication(schedule)
    place = {action: (r, i) for r, row in enumerate(lowered) for i, action in enumerate(row)}
    graph: dict[tuple[int, int], set[tuple[int, int]]] = {node: set() for node in place.values()}
    for action, (rank, index) in place.items():
        if index:
            graph[rank, index].add((rank, index - 1))
        name, _, direction = action.kind.value.partition("_")
        if name == "SEND" and sends_block and index + 1 < len(lowered[rank]):
            target = action.stage + _STEP[direction]
            graph[rank, index + 1].add(
                place[Action(Kind[f"RECV_{direction}"], target, action.microbatch)]
            )
        for letter in _FED_BY.get(name, ""):
            source = Action(Kind[letter], action.stage - _STEP[name], action.microbatch)
            graph[rank, index] |= {place[source]} if source in place else set()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True
