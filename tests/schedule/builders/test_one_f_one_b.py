"""1F1B: its grids, and that stage k keeps at most P-k activations."""

from __future__ import annotations

import pytest

from pipecomm.schedule import build
from tests.schedule.examples import SMALL_SIZES

GRIDS = {
    (1, 2): """
slot    0  1  2  3
rank 0 F0 B0 F1 B1
""",
    (2, 3): """
slot    0  1  2  3  4  5  6  7
rank 0 F0 F1  . B0 F2 B1  . B2
rank 1  . F0 B0 F1 B1 F2 B2  .
""",
    (4, 2): """
slot    0  1  2  3  4  5  6  7  8  9
rank 0 F0 F1  .  .  .  .  . B0  . B1
rank 1  . F0 F1  .  .  . B0  . B1  .
rank 2  .  . F0 F1  . B0  . B1  .  .
rank 3  .  .  . F0 B0 F1 B1  .  .  .
""",
    (3, 5): """
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13
rank 0 F0 F1 F2  .  . B0 F3 B1 F4 B2  . B3  . B4
rank 1  . F0 F1  . B0 F2 B1 F3 B2 F4 B3  . B4  .
rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  .  .
""",
}


@pytest.mark.parametrize("size", GRIDS, ids="{0[0]}x{0[1]}".format)
def test_schedule_of_small_size_is_the_grid_a_person_draws(size: tuple[int, int]) -> None:
    assert build("1f1b", *size).draw() == GRIDS[size].strip()


def test_peak_activations_follow_the_formula() -> None:
    for P, M in SMALL_SIZES:
        bound = [min(M, P - k) for k in range(P)]
        assert build("1f1b", P, M).peak_activations() == tuple(bound), (P, M)
