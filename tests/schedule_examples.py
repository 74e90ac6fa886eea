"""Schedules for tests: written as text, and all small ones that build offers."""

from __future__ import annotations

from pipecomm.schedule import Action, Schedule, build, known_schedules

__all__ = ["SMALL_SCHEDULES", "schedule_of"]

SMALL_SCHEDULES = [
    build(name, num_stages, num_microbatches)
    for name in known_schedules()
    for num_stages in range(1, 9)
    for num_microbatches in range(1, 17)
]


def schedule_of(*rows: str) -> Schedule:
    """One row of actions per rank: schedule_of("0F0 0B0", "1F0 1B0")."""
    return Schedule.from_lists("custom", [map(Action.parse, row.split()) for row in rows])
