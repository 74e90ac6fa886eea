"""Schedules as CSV text: a row per rank, an action per cell, as in torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
import re

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import Action
from pipecomm.schedule.ranks import Ranks

__all__ = ["format_table", "parse_table"]

# torch's cell for a forward and a backward that may overlap: (0F4;7B2)OVERLAP_F_B.
_FUSED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def format_table(ranks: Ranks) -> str:
    """One line per rank: `0F0,0F1,0B0,0B1`."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in ranks)


def parse_table(text: str, origin: str) -> Ranks:
    """The lists in CSV text. Empty cells (idle slots) and empty rows at the end mean nothing.

    The actions of a fused cell, `(0F4;7B2)OVERLAP_F_B`, follow one another, as torch runs them.
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
    return Ranks.of(
        tuple(
            _parse_action(part, f"{origin}, row {row}, column {column}")
            for column, cell in enumerate(cells, 1)
            if cell.strip()
            for part in _parts(cell.strip())
        )
        for row, cells in enumerate(rows, 1)
    )


def _parts(cell: str) -> list[str]:
    fused = _FUSED.fullmatch(cell)
    return fused[1].split(";") if fused else [cell]


def _parse_action(text: str, place: str) -> Action:
    try:
        action = Action.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{error} ({place})") from None
    if not action.kind.is_compute:
        raise ConfigError(
            f"expected compute actions only; got {text.strip()!r} ({place}); "
            "leave sends and receives out, they are derived from the order of the others"
        )
    return action
