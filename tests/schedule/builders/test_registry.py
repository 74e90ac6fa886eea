"""Building by name: every schedule is executable, and the picture above its file is true."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, Schedule, build, builders, known_schedules
from tests.schedule.examples import SMALL_SCHEDULES

IN_A_V = ("zb-v", "dualpipe-v")
OF_ONE_STAGE = (
    *("sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "planned"),
    *("pipedream", "pipedream-2bw", "paci"),
)


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_stages}x{schedule.num_microbatches}"


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


def test_every_known_name_builds_in_any_case() -> None:
    for name in known_schedules():
        assert build(name.upper(), 4, 4) == build(name, 4, 4)
        assert build(name.upper(), 4, 4).name == name


@pytest.mark.parametrize("name", ["zb-h2", "", None, 7])
def test_unknown_name_lists_the_known_ones(name: object) -> None:
    with pytest.raises(ConfigError, match=f"{', '.join(known_schedules())}; got {name!r}"):
        build(name, 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known_schedules())
@pytest.mark.parametrize("count", [0, -3, 2.5, True])
def test_counts_below_one_are_refused_by_name(name: str, count: object) -> None:
    with pytest.raises(ConfigError, match="num_stages to be an integer of at least 1"):
        build(name, count, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_microbatches to be an integer of at least 1"):
        build(name, 2, count)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known_schedules())
def test_as_many_ranks_as_its_stages_need_is_what_no_number_of_ranks_means(name: str) -> None:
    num_ranks = 2 if name in IN_A_V else 4
    assert build(name, 4, 4, num_ranks=num_ranks) == build(name, 4, 4)
    with pytest.raises(ConfigError, match="num_ranks to be an integer of at least 1"):
        build(name, 4, 4, num_ranks=0)


@pytest.mark.parametrize("name", OF_ONE_STAGE)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_several_stages_on_a_rank_are_refused_by_a_schedule_of_one(
    name: str, num_ranks: int
) -> None:
    text = f"{name}: expected as many stages as ranks; got 4 stages on {num_ranks} ranks"
    with pytest.raises(ConfigError, match=text):
        build(name, 4, 4, num_ranks=num_ranks)


def builder_files() -> list[Path]:
    folder = Path(builders.__file__).parent
    shared = {"__init__", "registry", "rows"}
    return sorted(path for path in folder.glob("*.py") if path.stem not in shared)


def test_each_named_schedule_has_a_file() -> None:
    assert len(builder_files()) == len(known_schedules())


@pytest.mark.parametrize("path", builder_files(), ids=lambda path: path.stem)
def test_picture_above_a_builder_is_what_draw_makes(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "\nslot " in text
    names = {"build": build, "Costs": Costs}
    examples = doctest.DocTestParser().get_doctest(text, names, path.name, None, 0)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=report.append)
    assert report == []
    assert result.attempted == 1
