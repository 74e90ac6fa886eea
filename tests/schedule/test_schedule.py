"""The schedule that users hold: its methods are the functions of the other files."""

from __future__ import annotations

import doctest
from pathlib import Path

from pipecomm.schedule import Costs, Schedule, build
from pipecomm.schedule.draw import draw
from pipecomm.schedule.memory import peak_activations
from pipecomm.schedule.simulate import simulate
from pipecomm.schedule.table import format_table


def test_methods_are_the_functions_that_read_the_data() -> None:
    schedule = build("1f1b", 3, 4)
    costs = Costs(1.0, 2.0, 0.5)
    assert schedule.simulate(costs) == simulate(schedule, costs)
    assert schedule.simulate() == simulate(schedule, Costs())
    assert schedule.draw() == draw(schedule)
    assert schedule.to_csv() == format_table(schedule.ranks)
    assert schedule.peak_activations() == peak_activations(schedule)


def test_what_is_derived_from_a_schedule_has_its_methods_too() -> None:
    schedule = build("1f1b", 2, 3)
    assert type(schedule.forward_only()) is Schedule
    assert type(Schedule.from_lists("mine", schedule.ranks)) is Schedule


def test_examples_of_the_schedule_page_run_as_written() -> None:
    page = Path(__file__).parents[2] / "docs" / "schedules.md"
    text = page.read_text().replace("```python\n", "\n").replace("\n```", "\n")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=report.append)
    assert len(examples.examples) > 8
    assert report == []
