"""Draws a schedule as people do: one row per rank, one column per time slot."""

from __future__ import annotations

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Kind
from pipecomm.schedule.costs import Costs
from pipecomm.schedule.data import ScheduleData
from pipecomm.schedule.simulate import simulate

__all__ = ["draw"]


def draw(schedule: ScheduleData, costs: Costs | None = None) -> str:
    """The grid when each compute action takes one slot and transfers take none.

    Where backwards are split, a whole one (B) takes the two slots of its parts I and W. A cell is
    `F3` where a rank has one stage, `0F3` where it has several, `.` where it idles. With `costs`
    a slot is a second. Raises ConfigError if one of them is not in whole seconds.
    """
    if costs is None:
        costs = Costs(backward_s=2.0 if Kind.I in schedule.kinds else 1.0, update_s=1.0)
    result = simulate(schedule, costs)
    has_one_stage = len(schedule.ranks) == schedule.num_stages
    grid = [["."] * round(result.step_s) for _ in schedule.ranks]
    for event in result.events:
        if event.action.kind.is_compute:
            if not (event.start_s.is_integer() and event.end_s.is_integer()):
                raise ConfigError(
                    "expected costs in whole seconds for a drawing as text; got "
                    f"{event.action} from {event.start_s:g} to {event.end_s:g} s"
                )
            for slot in range(round(event.start_s), round(event.end_s)):
                grid[event.rank][slot] = _cell(event.action, has_one_stage)
    header = ["slot", *map(str, range(round(result.step_s)))]
    rows = [header, *([f"rank {rank}", *cells] for rank, cells in enumerate(grid))]
    return "\n".join(_align(row, rows) for row in rows)


def _cell(action: Action, has_one_stage: bool) -> str:
    return f"{action.kind.value}{action.microbatch}" if has_one_stage else str(action)


def _align(row: list[str], rows: list[list[str]]) -> str:
    label_width = max(len(other[0]) for other in rows)
    cell_width = max(len(cell) for other in rows for cell in other[1:])
    return " ".join([row[0].ljust(label_width), *(cell.rjust(cell_width) for cell in row[1:])])
