"""The named schedules: literal grids, and the formulas the literature gives for them."""

from __future__ import annotations

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Schedule, build, known_schedules
from tests.schedule_examples import SMALL_SCHEDULES

GRIDS = {
    ("gpipe", 1, 2): """
slot    0  1  2  3
rank 0 F0 F1 B0 B1
""",
    ("gpipe", 2, 1): """
slot    0  1  2  3
rank 0 F0  .  . B0
rank 1  . F0 B0  .
""",
    ("gpipe", 3, 4): """
slot    0  1  2  3  4  5  6  7  8  9 10 11
rank 0 F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
rank 1  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
rank 2  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
""",
    ("1f1b", 1, 2): """
slot    0  1  2  3
rank 0 F0 B0 F1 B1
""",
    ("1f1b", 2, 3): """
slot    0  1  2  3  4  5  6  7
rank 0 F0 F1  . B0 F2 B1  . B2
rank 1  . F0 B0 F1 B1 F2 B2  .
""",
    ("1f1b", 4, 2): """
slot    0  1  2  3  4  5  6  7  8  9
rank 0 F0 F1  .  .  .  .  . B0  . B1
rank 1  . F0 F1  .  .  . B0  . B1  .
rank 2  .  . F0 F1  . B0  . B1  .  .
rank 3  .  .  . F0 B0 F1 B1  .  .  .
""",
    ("1f1b", 3, 5): """
slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13
rank 0 F0 F1 F2  .  . B0 F3 B1 F4 B2  . B3  . B4
rank 1  . F0 F1  . B0 F2 B1 F3 B2 F4 B3  . B4  .
rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  .  .
""",
    ("eager-1f1b", 2, 4): """
slot    0  1  2  3  4  5  6  7  8  9
rank 0 F0 F1 F2 B0 F3 B1  . B2  . B3
rank 1  . F0 B0 F1 B1 F2 B2 F3 B3  .
""",
}


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_stages}x{schedule.num_microbatches}"


@pytest.mark.parametrize("case", GRIDS, ids=lambda case: "{}-{}x{}".format(*case))
def test_schedule_of_small_size_is_the_grid_a_person_draws(case: tuple[str, int, int]) -> None:
    assert build(*case).draw() == GRIDS[case].strip()


@pytest.mark.parametrize("schedule", SMALL_SCHEDULES, ids=name_of)
def test_named_schedule_is_executable_and_has_the_bubble_of_the_formula(schedule: Schedule) -> None:
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    schedule.check()
    schedule.check(sends_block=True)
    result = schedule.simulate()
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert result.bubble == pytest.approx(bubble)
    assert result.rank_bubbles == pytest.approx([bubble] * num_stages)
    assert result.step_s == pytest.approx(2 * (num_microbatches + num_stages - 1))


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("gpipe", lambda M, P, k: M),
        ("1f1b", lambda M, P, k: min(M, P - k)),
        ("eager-1f1b", lambda M, P, k: min(M, 2 * (P - 1 - k) + 1)),
    ],
)
def test_peak_activations_follow_the_formula(name: str, bound: object) -> None:
    for schedule in SMALL_SCHEDULES:
        if schedule.name == name:
            M, P = schedule.num_microbatches, schedule.num_stages
            expected = tuple(bound(M, P, k) for k in range(P))  # type: ignore[operator]
            assert schedule.peak_activations() == expected


def test_every_known_name_builds_in_any_case() -> None:
    for name in known_schedules():
        assert build(name.upper(), 3, 4) == build(name, 3, 4)
        assert build(name.upper(), 3, 4).name == name


@pytest.mark.parametrize("name", ["zb-h1", "", None, 7])
def test_unknown_name_lists_the_known_ones(name: object) -> None:
    with pytest.raises(ConfigError, match="gpipe, 1f1b, eager-1f1b; got"):
        build(name, 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known_schedules())
@pytest.mark.parametrize("count", [0, -3, 2.5, True])
def test_counts_below_one_are_refused_by_name(name: str, count: object) -> None:
    with pytest.raises(ConfigError, match="num_stages to be an integer of at least 1"):
        build(name, count, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_microbatches to be an integer of at least 1"):
        build(name, 2, count)  # type: ignore[arg-type]
