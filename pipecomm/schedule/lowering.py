"""Adds communication to compute actions: which receives to post before, which sends after each one.

What the actions of a lowered list mean, for everyone who runs one:
  F, B, I, W, U   compute; wait for their own receive first, if they have one
  RECV_F, RECV_B  post the receive and go on
  SEND_F, SEND_B  post the send and go on
"""

from __future__ import annotations

from pipecomm.schedule.core_lists import core_lists
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.ranks import Ranks

__all__ = ["with_communication"]


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
    return Ranks(*core_lists(schedule.ranks, schedule.placement).lower())
