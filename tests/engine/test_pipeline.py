"""Gradients and losses of a pipeline over ranks equal those of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.pipeline_cases import CasesBySize
from tests.engine.pipeline_step_cases import (
    CASES,
    autocast,
    automatic,
    backward_pre_hook,
    custom_schedule,
    few_microbatches,
    frozen_embedding,
    frozen_stages,
    identity_outputs,
    integers_beside,
    iterators_as_data,
    keywords_on_every_stage,
    length_changes_between_microbatches,
    length_changes_between_steps,
    lossy_codecs,
    object_as_keyword,
    one_row_each,
    output_is_a_view,
    policies,
    ready_microbatches_of_other_sizes,
    residual_beside,
    scalar_beside,
    smaller_last_batch,
    stage_without_parameters,
    uneven_rows,
    valid_token_loss,
    without_eager_sends,
)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results() -> CasesBySize:
    return CasesBySize(CASES)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, smaller_last_batch),
        (2, one_row_each),
        (2, length_changes_between_steps),
        (2, ready_microbatches_of_other_sizes),
        (2, output_is_a_view),
        (2, backward_pre_hook),
        (2, valid_token_loss),
        (3, uneven_rows),
        (3, residual_beside),
        (3, frozen_embedding),
        (3, stage_without_parameters),
        (4, length_changes_between_microbatches),
        (4, residual_beside),
        (4, custom_schedule),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_step_equals_unsplit_model(results: Any, size: int, case: Callable[..., Any]) -> None:
    assert max(results(size, case)) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_any_number_of_microbatches_equals_unsplit_model(
    results: Any, size: int, schedule: str, num_microbatches: int
) -> None:
    by_rank = results(size, few_microbatches)
    assert max(found[f"{schedule} {num_microbatches}"] for found in by_rank) < TOLERANCE


@pytest.mark.parametrize("which", ["first", "middle", "all but last", "last"])
def test_frozen_stages_end_and_leave_the_rest_equal(results: Any, which: str) -> None:
    assert max(found[which] for found in results(3, frozen_stages)) < TOLERANCE


def test_integers_between_stages_arrive_exactly_and_ask_for_no_gradient(results: Any) -> None:
    for found in results(3, integers_beside):
        assert found["error"] < TOLERANCE
        assert found["exact"]
        assert not found["asked for gradients"]


def test_scalar_between_stages_keeps_its_shape_and_gradient(results: Any) -> None:
    first, last = results(2, scalar_beside)
    assert max(first["error"], last["error"]) < TOLERANCE
    # Four microbatches of the pipeline and four of the reference.
    assert set(last["shapes"]) == {()}


def test_keyword_tensors_are_split_for_each_stage(results: Any) -> None:
    expected = [[10, 11], [12, 13], [14, 15], [16, 17]]
    for found in results(3, keywords_on_every_stage):
        assert found["error"] < TOLERANCE
        assert found["seen"] == expected


def test_object_as_keyword_is_the_same_for_every_microbatch(results: Any) -> None:
    for found in results(2, object_as_keyword):
        assert found["error"] < TOLERANCE
        assert found["same"] == [True] * 4


@pytest.mark.parametrize(("codec", "limit"), [("int8", 0.1), ("int4", 0.5)])
def test_lossy_codec_stays_near_but_differs(results: Any, codec: str, limit: float) -> None:
    errors = [found[codec] for found in results(2, lossy_codecs)]
    assert 1e-5 < max(errors) < limit


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "eager-1f1b"])
def test_no_schedule_needs_eager_sends(results: Any, schedule: str) -> None:
    assert max(found[schedule] for found in results(4, without_eager_sends)) < TOLERANCE


@pytest.mark.parametrize(
    ("policy", "codecs", "compressed"),
    [
        ("one for each", ["int4", "raw", "int8"], [[1, 1], [0, 0], [1, 1]]),
        ("the first", ["int4", "raw", "raw"], [[1, 1], [0, 0], [0, 0]]),
        ("without ends", ["raw", "int4", "raw"], [[0, 0], [1, 1], [0, 0]]),
        ("after a step", ["int4"] * 3, [[0, 1]] * 3),
        ("too small", ["int4"] * 3, [[0, 0]] * 3),
        ("guarded", ["raw"] * 3, [[0, 0]] * 3),
    ],
)
def test_policy_decides_for_each_boundary_and_step(
    results: Any, policy: str, codecs: list[str], compressed: list[list[int]]
) -> None:
    by_rank = [found[policy] for found in results(4, policies)]
    assert [found["forward"] for found, _ in by_rank[:-1]] == codecs
    assert [found["backward"] for found, _ in by_rank[1:]] == ["raw"] * 3
    assert [sent for _, sent in by_rank] == [*compressed, []]


def test_auto_takes_8_bits_on_slow_links(results: Any) -> None:
    first, last = results(2, automatic)
    for mbps in (8000.0, 20.0):
        assert (first[mbps]["forward"], last[mbps]["backward"]) == ("int8", "int8")
    # One host's memory is not measured, however busy the machine is.
    assert (first[0.0]["forward"], last[0.0]["backward"]) == ("raw", "raw")


def test_autocast_boundary_is_bf16_in_both_directions(results: Any) -> None:
    first, last = results(2, autocast)
    assert max(first["error"], last["error"]) < 2e-2
    assert last["inputs"] == [torch.bfloat16] * 2
    assert last["gradients"] == [torch.bfloat16] * 2


def test_outputs_meet_their_own_targets_and_come_back_in_order(results: Any) -> None:
    *others, last = results(3, identity_outputs)
    assert last == {"losses": [0.0] * 8, "in order": True}
    assert all(found == {"losses": [], "in order": False} for found in others)


def test_iterators_give_exactly_one_step_at_a_time(results: Any) -> None:
    first, last = results(2, iterators_as_data)
    assert first == {"losses": [None, None], "left": 0}
    assert last["left"] == 0
    assert all(loss > 0 for loss in last["losses"])
