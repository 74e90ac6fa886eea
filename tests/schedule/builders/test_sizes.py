"""Every named schedule at every small size: executable, or refused with the sizes that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Schedule, build, known_schedules

LARGEST_P, LARGEST_M, LARGEST_V = 8, 16, 3
IN_A_V = {"zb-v", "dualpipe-v"}
LOOPED = {"interleaved", "looped-bfs"}


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Ranks, stages per rank, microbatches."""
    for P in range(1, LARGEST_P + 1):
        for v in range(1, LARGEST_V + 1) if name in LOOPED else (2,) if name in IN_A_V else (1,):
            for M in range(1, LARGEST_M + 1):
                yield P, v, M


def has_form(name: str, P: int, v: int, M: int) -> bool:
    return {
        "interleaved": v == 1 or M % max(1, M // P) == 0,
        "dualpipe-v": M >= 2 * P,
        "pipedream-2bw": M % P == 0,
        "paci": M % P == 0,
    }.get(name, True)


@pytest.mark.parametrize("name", known_schedules())
def test_every_size_is_executable_or_refused_with_sizes_that_exist(name: str) -> None:
    num_built = 0
    for P, v, M in sizes(name):
        if has_form(name, P, v, M):
            schedule = build(name, P * v, M, num_ranks=P)
            schedule.check()
            check_counts(schedule, P, v, M)
            num_built += 1
            continue
        with pytest.raises(ConfigError, match=f"{name}: expected") as caught:
            build(name, P * v, M, num_ranks=P)
        last = str(caught.value).rsplit(";", 1)[1]
        for number in map(int, re.findall(r"\d+", last)):
            build(name, P * v, number, num_ranks=P).check()
    assert num_built > 100 or name in {"pipedream-2bw", "paci", "dualpipe-v"}


def check_counts(schedule: Schedule, P: int, v: int, M: int) -> None:
    assert (schedule.num_stages, schedule.num_microbatches, len(schedule.ranks)) == (P * v, M, P)
    assert all(1 <= peak <= M for peak in schedule.peak_activations())


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "planned"])
def test_schedule_of_one_stage_per_rank_needs_no_free_sends(name: str) -> None:
    for P, _, M in sizes(name):
        if (P + M) % 3 == 0:
            build(name, P, M).check(sends_block=True)
