"""Each claim about CUDA says what it stands on: a GPU's results, the stand-in driver, or nothing.

docs/devices.md has the list; other pages say "not yet run on a GPU" or lead there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.check import parse
from tests.device.plan import plan

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LIST = ROOT / "docs" / "devices.md"
_CLAIM = re.compile(r"\b(?:GPUs?|CUDA)\b")
_BACKED = re.compile(
    r"(?:has|have|yet|was) (?:yet )?(?:run|been run) on a GPU|devices\.md|stand-in driver"
    r"|No GPU has|nothing was run on such machines",
    re.IGNORECASE,
)
# "by copy engines" holds for some paths only, which the same piece has to name.
_ENGINE = re.compile(r"copy engines?", re.IGNORECASE)
_ENGINE_PATHS = re.compile(r"between two devices|inside one GPU|multiprocessors", re.IGNORECASE)


def pieces(text: str, each_item: bool) -> Iterator[str]:
    """Sections, each behind the page's opening; or the items of its lists, each alone."""
    if each_item:
        yield from re.split(r"\n(?=- |#|\n)", text)
        return
    opening, *sections = re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
    yield opening
    for section in sections:
        yield f"{opening}\n{section}"


def unbacked(text: str, each_item: bool = False) -> list[str]:
    """First lines of the pieces that speak of CUDA and say nowhere what that stands on."""
    found = []
    for piece in pieces(text, each_item):
        own = piece if each_item else re.split(r"^(?=##+ )", piece, flags=re.MULTILINE)[-1]
        lacks_backing = _CLAIM.search(own) and not _BACKED.search(piece)
        if lacks_backing or (_ENGINE.search(own) and not _ENGINE_PATHS.search(own)):
            found.append(own.strip().splitlines()[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_said_of_cuda_says_what_it_stands_on(page: Path) -> None:
    assert unbacked(page.read_text(), each_item=page.name == "CHANGELOG.md") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\nOpening.\n## B\nTransfers take no SM of the GPU.\n", ["## B"]),
        ("# A\nNot yet run on a GPU.\n## B\nTransfers take no SM of the GPU.\n", []),
        ("# A\nCUDA is fast.\n## B\n[not yet run on a GPU](devices.md)\n", ["# A"]),
        ("# A\nSee devices.md.\n## B\nMoved by copy engines.\n", ["## B"]),
        ("# A\nOnly words.\n", []),
    ],
)
def test_claim_that_stands_on_nothing_is_found(text: str, expected: list[str]) -> None:
    assert unbacked(text) == expected


def test_items_of_the_changelog_stand_each_on_its_own() -> None:
    text = "# Log\n- CUDA is fast.\n- CUDA tensors cross. Not yet run on a GPU.\n- Words.\n"
    assert unbacked(text, each_item=True) == ["- CUDA is fast."]


def rows_of_the_list() -> list[list[str]]:
    section = LIST.read_text().split("## What each claim stands on\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return lines[1:]


def test_list_names_tests_and_steps_that_exist() -> None:
    steps = {step.name for step in plan(parse([]))}
    rows = rows_of_the_list()
    assert len(rows) > 8
    for _, seen, on_a_gpu in rows:
        names = re.findall(r"`([\w/.]+)`", seen)
        assert names or seen.startswith("nothing"), seen
        assert all((ROOT / "tests" / name).exists() for name in names), seen
        assert on_a_gpu.removeprefix("not yet: ") in steps, on_a_gpu
