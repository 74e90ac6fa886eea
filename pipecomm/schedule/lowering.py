"""Adds communication to compute actions: which receives to post before, which sends after each one.

What the actions of a lowered list mean, for everyone who runs one:
  F, B            compute; wait for their own receive first, if they have one
  RECV_F, RECV_B  post the receive and go on
  SEND_F, SEND_B  post the send and go on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipecomm.schedule.action import Action, Kind, Ranks

__all__ = ["add_communication", "receive_for", "send_after", "sender_of", "stage_owners"]


def stage_owners(ranks: Ranks) -> dict[int, int]:
    """The rank that holds each stage."""
    return {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}


def receive_for(action: Action, owners: Mapping[int, int]) -> Action | None:
    """The receive a compute action waits for; None if its input is made on its own rank."""
    is_forward = action.kind is Kind.F
    source = action.stage - 1 if is_forward else action.stage + 1
    if owners.get(source, owners[action.stage]) == owners[action.stage]:
        return None
    return Action(Kind.RECV_F if is_forward else Kind.RECV_B, action.stage, action.microbatch)


def send_after(action: Action, owners: Mapping[int, int]) -> Action | None:
    """The send that follows a compute action; None if its result stays on its own rank."""
    is_forward = action.kind is Kind.F
    target = action.stage + 1 if is_forward else action.stage - 1
    if owners.get(target, owners[action.stage]) == owners[action.stage]:
        return None
    return Action(Kind.SEND_F if is_forward else Kind.SEND_B, action.stage, action.microbatch)


def sender_of(receive: Action) -> int:
    """The stage whose send a receive takes."""
    return receive.stage - 1 if receive.kind is Kind.RECV_F else receive.stage + 1


def add_communication(ranks: Ranks) -> Ranks:
    """Per rank, the compute actions with their sends and receives, in the order to execute them.

    A receive is posted one microbatch ahead: before the compute that uses the previous message
    of the same stage and direction (the first one: before the compute action in front of its
    own). So at most two receives per stage and direction are ever open, whatever the number of
    microbatches: the one needed next and one more.

        stage 1 of 2:  RECV_F0 RECV_F1 F0 B0 SEND_B0 RECV_F2 F1 B1 SEND_B1 ...
    """
    owners = stage_owners(ranks)
    return tuple(_lower(actions, owners) for actions in ranks)


def _lower(actions: Sequence[Action], owners: Mapping[int, int]) -> tuple[Action, ...]:
    posts = _posts_by_position(actions, owners)
    lowered: list[Action] = []
    for position, action in enumerate(actions):
        lowered += posts[position]
        lowered.append(action)
        send = send_after(action, owners)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)


def _posts_by_position(
    actions: Sequence[Action], owners: Mapping[int, int]
) -> defaultdict[int, list[Action]]:
    posts: defaultdict[int, list[Action]] = defaultdict(list)
    previous_use: dict[tuple[Kind, int], int] = {}
    for position, action in enumerate(actions):
        receive = receive_for(action, owners)
        if receive is not None:
            channel = (receive.kind, receive.stage)
            posts[previous_use.get(channel, max(0, position - 1))].append(receive)
            previous_use[channel] = position
    return posts
