"""Adds communication to compute actions: which receives to post before, which sends after each one.

What the actions of a lowered list mean, for everyone who runs one:
  F, B, I, W      compute; wait for their own receive first, if they have one
  RECV_F, RECV_B  post the receive and go on
  SEND_F, SEND_B  post the send and go on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipecomm.schedule.action import RECEIVES, SENDS, Action, Direction, Ranks
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.placement import Hop, Placement

__all__ = ["message_in", "message_out", "with_communication"]


def message_in(action: Action, placement: Placement) -> Hop | None:
    """The way of the message that a compute action waits for; None if it takes none."""
    hop = placement.hops_in[action.kind][action.stage]
    return hop if hop is not None and hop.is_message else None


def message_out(action: Action, placement: Placement) -> Hop | None:
    """The way of the message that a compute action makes; None if nothing leaves its rank."""
    hop = placement.hops_out[action.kind][action.stage]
    return hop if hop is not None and hop.is_message else None


def with_communication(schedule: ScheduleData) -> Ranks:
    """Per rank, the actions to execute: the schedule's with their sends and receives put in.

    Compute actions wait for their own receive; SEND and RECV are posted without waiting. A
    receive is posted one message ahead: before the compute that uses the previous message from
    the same rank in the same direction (the first one: before the compute action in front of
    its own). So at most two receives per rank and direction are ever open, whatever the number
    of microbatches and stages: the one needed next and one more.

        stage 1 of 2:  RECV_F0 RECV_F1 F0 B0 SEND_B0 RECV_F2 F1 B1 SEND_B1 ...

    Raises ConfigError if the lists put a stage on two ranks, or leave one out.
    """
    return tuple(_lower(actions, schedule.placement) for actions in schedule.ranks)


def _lower(actions: Sequence[Action], placement: Placement) -> tuple[Action, ...]:
    posts = _posts_by_position(actions, placement)
    lowered: list[Action] = []
    for position, action in enumerate(actions):
        lowered += posts.get(position, ())
        lowered.append(action)
        hop = message_out(action, placement)
        if hop is not None:
            lowered.append(Action(SENDS[hop.direction], action.stage, action.microbatch))
    return tuple(lowered)


def _posts_by_position(
    actions: Sequence[Action], placement: Placement
) -> defaultdict[int, list[Action]]:
    posts: defaultdict[int, list[Action]] = defaultdict(list)
    previous_use: dict[tuple[Direction, int, int], int] = {}
    for position, action in enumerate(actions):
        hop = message_in(action, placement)
        if hop is not None:
            receive = Action(RECEIVES[hop.direction], action.stage, action.microbatch)
            posts[previous_use.get(hop.channel, max(0, position - 1))].append(receive)
            previous_use[hop.channel] = position
    return posts
