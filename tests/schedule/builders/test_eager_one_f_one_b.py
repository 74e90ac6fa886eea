"""Eager-1F1B: its grid, and the activations that its longer warmup keeps."""

from __future__ import annotations

import pytest

from pipecomm.schedule import build
from tests.schedule.examples import SMALL_SIZES

GRIDS = {
    (2, 4): """
slot    0  1  2  3  4  5  6  7  8  9
rank 0 F0 F1 F2 B0 F3 B1  . B2  . B3
rank 1  . F0 B0 F1 B1 F2 B2 F3 B3  .
""",
}


@pytest.mark.parametrize("size", GRIDS, ids="{0[0]}x{0[1]}".format)
def test_schedule_of_small_size_is_the_grid_a_person_draws(size: tuple[int, int]) -> None:
    assert build("eager-1f1b", *size).draw() == GRIDS[size].strip()


def test_peak_activations_follow_the_formula() -> None:
    for P, M in SMALL_SIZES:
        bound = [min(M, 2 * (P - 1 - k) + 1) for k in range(P)]
        assert build("eager-1f1b", P, M).peak_activations() == tuple(bound), (P, M)
