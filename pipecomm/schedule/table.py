"""Schedules as CSV text: a row per rank, an action per cell, as in torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action, Ranks

__all__ = ["format_table", "parse_table"]


def format_table(ranks: Ranks) -> str:
    """One line per rank: `0F0,0F1,0B0,0B1`."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in ranks)


def parse_table(text: str, origin: str) -> Ranks:
    """The lists in CSV text. Empty cells (idle slots) and empty rows at the end mean nothing.

    Raises ConfigError that names `origin`, row and column, both counted from 1.
    """
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ConfigError(f"expected CSV text; got {error} in {origin}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ConfigError(f"expected a row of actions per rank; got an empty table in {origin}")
    return tuple(
        tuple(
            _parse_cell(cell, f"{origin}, row {row}, column {column}")
            for column, cell in enumerate(cells, 1)
            if cell.strip()
        )
        for row, cells in enumerate(rows, 1)
    )


def _parse_cell(cell: str, place: str) -> Action:
    try:
        action = Action.parse(cell)
    except ConfigError as error:
        raise ConfigError(f"{error} ({place})") from None
    if not action.kind.is_compute:
        raise ConfigError(
            f"expected F and B only; got {cell.strip()!r} ({place}); "
            "leave sends and receives out, they are derived from the order of F and B"
        )
    return action
