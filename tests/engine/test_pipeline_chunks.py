"""Several stages on a rank: gradients of the unsplit model, errors that name their stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipecomm.errors import ConfigError, StageFailedError
from tests.engine.chunk_cases import (
    CASES,
    clipping,
    coded,
    evaluation,
    frozen_chunks,
    handed_over_in_memory,
    keywords_on_every_stage,
    looped_bfs,
    other_numbers_of_chunks,
    second_chunk_raises,
    several_tensors,
    uneven_rows,
    v_shaped,
    without_eager_sends,
    wrapped_chunks,
)
from tests.engine.pipeline_cases import CasesBySize

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(CASES)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, uneven_rows),
        (4, uneven_rows),
        (2, without_eager_sends),
        (4, without_eager_sends),
        (2, looped_bfs),
        (4, looped_bfs),
        (2, several_tensors),
        (2, keywords_on_every_stage),
        (2, clipping),
        (2, evaluation),
        (4, evaluation),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_step_equals_unsplit_model(results: Any, size: int, case: Callable[..., Any]) -> None:
    assert max(results(size, case)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_lossy_codec_stays_near_but_differs(results: Any, size: int) -> None:
    assert 1e-5 < max(results(size, coded)) < 0.1


@pytest.mark.parametrize("which", ["first round", "middle", "last"])
def test_frozen_chunks_leave_the_rest_equal(results: Any, which: str) -> None:
    assert max(found[which] for found in results(2, frozen_chunks)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_placement_with_first_and_last_stage_on_one_rank_equals_unsplit_model(
    results: Any, size: int
) -> None:
    found = results(size, v_shaped)
    assert max(one["error"] for one in found) < TOLERANCE
    assert max(one["evaluation"] for one in found) < TOLERANCE
    # The last rank holds the two stages in the middle: one boundary of each direction is inside.
    assert found[0]["codecs"] == {"forward": "int4", "backward": "raw"}
    assert found[-1]["codecs"] == {"forward": "int4", "backward": "raw"}


def test_stages_of_one_rank_hand_over_in_memory(results: Any) -> None:
    assert results(2, handed_over_in_memory) == [True, True]


@pytest.mark.parametrize(("kind", "builtin"), [("F", ValueError), ("B", RuntimeError)])
def test_error_names_the_stage_and_not_the_rank(results: Any, kind: str, builtin: type) -> None:
    first, second = (found[kind] for found in results(2, second_chunk_raises))
    assert type(first.error) is builtin
    (note,) = first.notes
    assert note.startswith(f"pipecomm: in stage 2 of 4, {kind} of microbatch ")
    assert isinstance(second.error, StageFailedError)
    assert note.removeprefix("pipecomm: in ") in str(second.error)


def test_ranks_with_other_numbers_of_stages_refuse_each_other(results: Any) -> None:
    for outcome in results(2, other_numbers_of_chunks):
        assert isinstance(outcome.error, ConfigError)
        assert "4 stages" in str(outcome.error)
        assert "6 stages" in str(outcome.error)


def test_each_wrapped_chunk_reduces_once_in_a_step(results: Any) -> None:
    for found in results(4, wrapped_chunks):
        assert found["error"] < TOLERANCE
        assert found["reduced"] == sorted([*found["stages"]] * 2)
