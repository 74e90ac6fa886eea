"""Whatever a batch comes in, and however tensors lie, steps equal those of the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomm.errors import StageFailedError
from tests.engine.pipeline_cases import CasesBySize
from tests.engine.pipeline_data_cases import (
    channels_last,
    containers_as_data,
    containers_in_evaluation,
    marked_table,
    view_after_transpose,
    wrappers_between_stages,
)

TOLERANCE = 1e-5
CASES = {
    2: (
        containers_as_data,
        containers_in_evaluation,
        marked_table,
        view_after_transpose,
        wrappers_between_stages,
    ),
    3: (channels_last,),
}


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(CASES)


@pytest.mark.parametrize("name", ["OrderedDict", "UserDict", "namedtuple", "nested"])
def test_step_on_a_container_equals_unsplit_model(results: Any, name: str) -> None:
    for error, num_rows in (found[name] for found in results(2, containers_as_data)):
        assert error < TOLERANCE
        assert num_rows == {2}


def test_evaluation_on_containers_equals_unsplit_model(results: Any) -> None:
    _, last = results(2, containers_in_evaluation)
    assert max(last.values()) < TOLERANCE


def test_marked_table_reaches_every_microbatch_whole(results: Any) -> None:
    assert max(results(2, marked_table)) < TOLERANCE


@pytest.mark.parametrize(("codec", "limit"), [("raw", TOLERANCE), ("int8", 0.1)])
def test_view_that_the_unsplit_model_allows_works_in_the_next_stage(
    results: Any, codec: str, limit: float
) -> None:
    error = max(found[codec] for found in results(2, view_after_transpose))
    assert error < limit
    assert (error > TOLERANCE) == (codec == "int8")


def test_channels_last_stages_keep_their_format_in_both_directions(results: Any) -> None:
    by_rank = results(3, channels_last)
    for found in by_rank:
        assert found["error"] < TOLERANCE
        # Two steps of three microbatches: inputs, and gradients of outputs.
        assert sorted(found["seen"]) == sorted(found["unsplit"] * 6)
    assert [found["unsplit"] for found in by_rank[:2]] == [[True, True]] * 2


@pytest.mark.parametrize("place", ["output", "gradient"])
@pytest.mark.parametrize("kind", ["DTensor", "Doubled"])
def test_wrapper_without_memory_is_a_type_error_on_every_rank(
    results: Any, kind: str, place: str
) -> None:
    outcomes = [found[f"{kind} as {place}"] for found in results(2, wrappers_between_stages)]
    cause, other = outcomes if place == "output" else outcomes[::-1]
    assert isinstance(cause.error, TypeError)
    assert f"got a {kind}, a class with a __torch_dispatch__" in str(cause.error)
    assert isinstance(other.error, StageFailedError)
    assert f"got a {kind}" in str(other.error)
    assert "microbatch 0" in str(other.error)
