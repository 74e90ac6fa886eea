"""A section: its number, its title, and what an error in it does to this rank and to others."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomm.engine.failures import Failure
from pipecomm.engine.section import Sections
from pipecomm.errors import ConfigError, StageFailedError, TransportError


class FakeLinks:
    """Notes what is said to the other ranks."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []
        self.iterations: list[int | None] = []
        self.aborts: list[str] = []
        self.fails_at_begin: Exception | None = None
        self.fails_at_abort: Exception | None = None

    def begin_step(self, number: int, title: str, iteration: int | None) -> None:
        self.begun.append((number, title))
        self.iterations.append(iteration)
        if self.fails_at_begin is not None:
            raise self.fails_at_begin

    def abort(self, text: str) -> None:
        self.aborts.append(text)
        if self.fails_at_abort is not None:
            raise self.fails_at_abort


@pytest.fixture
def links() -> FakeLinks:
    return FakeLinks()


def run(sections: Sections, error: BaseException | None = None) -> None:
    with sections.open("train_step", lambda: "stage 1 of 3"):
        if error is not None:
            raise error


def test_sections_are_counted_from_1_with_their_titles(links: Any) -> None:
    sections = Sections(1, links)
    run(sections)
    with pytest.raises(ValueError, match="boom"):
        run(sections, ValueError("boom"))
    run(sections)
    assert links.begun == [(1, "train_step"), (2, "train_step"), (3, "train_step")]


def test_error_is_told_with_its_place_and_raised_as_it_is(links: Any) -> None:
    error = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught:
        run(Sections(1, links), error)
    assert caught.value is error
    assert getattr(error, "__notes__", []) in (["pipecomm: in stage 1 of 3"], [])
    (text,) = links.aborts
    assert Failure.unpacked(text) == Failure(1, "stage 1 of 3", "ValueError", "ValueError", "boom")


def test_failure_of_another_rank_is_passed_on_and_raised_in_its_words(links: Any) -> None:
    packed = Failure(0, "stage 0", "KeyError", "", "'x'").packed()
    with pytest.raises(StageFailedError, match="stage 0: KeyError: 'x'"):
        run(Sections(1, links), StageFailedError(packed))
    assert links.aborts == [packed]


def test_section_that_others_have_given_up_already_does_not_run(links: Any) -> None:
    links.fails_at_begin = StageFailedError("rank 0 cannot")
    ran = []
    with pytest.raises(StageFailedError, match="rank 0 cannot"):  # noqa: SIM117
        with Sections(1, links).open("title", lambda: ""):
            ran.append(True)
    assert ran == []


def test_error_at_hand_is_not_hidden_by_one_of_the_links(links: Any) -> None:
    links.fails_at_abort = TransportError("closed")
    with pytest.raises(ValueError, match="boom"):
        run(Sections(1, links), ValueError("boom"))


def test_rank_alone_has_nobody_to_tell() -> None:
    with pytest.raises(ValueError, match="boom"):
        run(Sections(0, None), ValueError("boom"))


def test_closed_sections_cannot_be_opened(links: Any) -> None:
    sections = Sections(1, links)
    sections.close()
    with pytest.raises(ConfigError, match=r"expected an open pipeline; got .* closed"):
        run(sections)
    assert links.begun == []


def test_links_learn_the_users_number_of_a_section_that_has_one(links: FakeLinks) -> None:
    sections = Sections(0, links)  # type: ignore[arg-type]
    with sections.open("train_step", lambda: "", 7):
        pass
    with sections.open("clipping", lambda: ""):
        pass
    assert links.iterations == [7, None]
