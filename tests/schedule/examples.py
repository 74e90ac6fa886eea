"""Schedules for tests: written as text, and all small ones with one stage per rank."""

from __future__ import annotations

from pipecomm.schedule import Action, Schedule, build

__all__ = ["ONE_STAGE_PER_RANK", "SMALL_SCHEDULES", "SMALL_SIZES", "schedule_of"]

ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "eager-1f1b")
# Ranks, microbatches.
SMALL_SIZES = [(P, M) for P in range(1, 9) for M in range(1, 17)]
SMALL_SCHEDULES = [build(name, *size) for name in ONE_STAGE_PER_RANK for size in SMALL_SIZES]


def schedule_of(*rows: str) -> Schedule:
    """One row of actions per rank: schedule_of("0F0 0B0", "1F0 1B0")."""
    return Schedule.from_lists("custom", [map(Action.parse, row.split()) for row in rows])
