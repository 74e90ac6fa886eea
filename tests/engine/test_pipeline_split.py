"""Pipelines with split backwards: gradients of the unsplit model, bits of 1F1B, memory as said."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomm.errors import StageFailedError
from tests.engine import split_pipeline_cases as cases
from tests.engine.pipeline_cases import CasesBySize

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(cases.CASES)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", cases.ORDERS)
def test_gradients_equal_the_unsplit_model(results: Any, size: int, name: str) -> None:
    assert max(found[name] for found in results(size, cases.orders)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", cases.V_SHAPED)
def test_two_stages_on_a_rank_split_too(results: Any, size: int, name: str) -> None:
    assert max(found[name] for found in results(size, cases.v_shaped)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_in_a_v_have_the_bits_of_whole_backwards(results: Any, size: int) -> None:
    assert all(results(size, cases.same_bits_in_a_v))


@pytest.mark.parametrize(
    "name", ["several tensors", "first frozen", "last frozen", "without layers"]
)
def test_other_stages_split_too(results: Any, name: str) -> None:
    found = results(2, cases.several_tensors_and_frozen)
    assert max(one[name] for one in found) < TOLERANCE


def test_schedule_of_a_file_may_split(results: Any) -> None:
    assert max(results(2, cases.from_a_file)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("name", cases.ORDERS)
def test_gradients_have_the_bits_of_whole_backwards(
    results: Any, size: int, codec: str, name: str
) -> None:
    assert all(found[f"{codec}, {name}"] for found in results(size, cases.same_bits))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", *cases.ORDERS])
def test_peak_of_live_activations_is_what_the_schedule_says(
    results: Any, size: int, name: str
) -> None:
    for found in results(size, cases.live_activations):
        measured, said, left = found[name]
        assert measured == said
        assert left == 0


def test_peaks_differ_between_schedules(results: Any) -> None:
    """Or the test above could not tell."""
    peaks = {found[name][0] for found in results(4, cases.live_activations) for name in found}
    assert peaks >= {1, 2, 3, 4, cases.NUM_MICROBATCHES}


@pytest.mark.parametrize(
    ("name", "kind", "place"), [("I", RuntimeError, "I of"), ("W", ValueError, "W of microbatch 1")]
)
def test_error_in_a_part_names_it_on_every_rank(
    results: Any, name: str, kind: type, place: str
) -> None:
    first, last = (found[name] for found in results(2, cases.errors))
    assert type(last.error) is kind
    assert f"stage 1 of 2, {place}" in " ".join(last.notes)
    assert isinstance(first.error, StageFailedError)
    assert f"stage 1 of 2, {place}" in str(first.error)


def test_evaluation_between_steps_changes_nothing(results: Any) -> None:
    assert results(2, cases.evaluation_between) == [True, True]
