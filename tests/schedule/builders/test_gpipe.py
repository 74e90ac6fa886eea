"""GPipe: its grids, and that every activation of a step is kept."""

from __future__ import annotations

import pytest

from pipecomm.schedule import build
from tests.schedule.examples import SMALL_SIZES

GRIDS = {
    (1, 2): """
slot    0  1  2  3
rank 0 F0 F1 B0 B1
""",
    (2, 1): """
slot    0  1  2  3
rank 0 F0  .  . B0
rank 1  . F0 B0  .
""",
    (3, 4): """
slot    0  1  2  3  4  5  6  7  8  9 10 11
rank 0 F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
rank 1  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
rank 2  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
""",
}


@pytest.mark.parametrize("size", GRIDS, ids="{0[0]}x{0[1]}".format)
def test_schedule_of_small_size_is_the_grid_a_person_draws(size: tuple[int, int]) -> None:
    assert build("gpipe", *size).draw() == GRIDS[size].strip()


def test_peak_activations_follow_the_formula() -> None:
    for P, M in SMALL_SIZES:
        bound = [M] * P
        assert build("gpipe", P, M).peak_activations() == tuple(bound), (P, M)
