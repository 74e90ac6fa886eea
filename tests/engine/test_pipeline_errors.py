"""Whatever goes wrong on one rank ends the step on every rank with that rank's error."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.errors import (
    ConfigError,
    LinkTimeoutError,
    PeerLostError,
    PipecommError,
    StageFailedError,
)
from tests.engine.pipeline_cases import (
    WIDTH,
    linear_stages,
    results_of,
    rows,
    run_cases,
)
from tests.engine.pipeline_error_cases import (
    CALLS,
    CASES,
    SIZE,
    UNTRAVELLED,
    Outcome,
    backward_raises,
    calls_differ,
    failure_after_the_others_are_done,
    group_without_this_rank,
    inputs_end_early,
    keyword_rows_differ,
    loss_raises,
    outputs_that_cannot_travel,
    reader_breaks,
    settings_differ,
    slow_stage,
    stage_raises,
    stage_raises_other_classes,
    step_after_an_error_is_right,
    step_after_close,
    step_outcome,
    targets_end_early,
    too_few_rows,
    wrong_number_of_stages,
)
from tests.ranks import run_ranks, spawn_ranks

# Far more than needed, far less than a timeout of torch.distributed.
SOON_S = 10.0


@pytest.fixture(scope="module")
def results() -> Callable[[Callable[..., Any]], list[Any]]:
    """results(case) -> the case's result on each rank."""
    by_rank = spawn_ranks(SIZE, run_cases, CASES[SIZE], timeout_s=120)

    def of(case: Callable[..., Any]) -> list[Any]:
        return results_of(by_rank, case)

    return of


def assert_all_say(outcomes: list[Outcome], kind: type[BaseException], *texts: str) -> None:
    """Every rank raised `kind` soon, with all of `texts`."""
    for outcome in outcomes:
        assert isinstance(outcome.error, kind)
        assert outcome.seconds < SOON_S
        assert all(text in str(outcome.error) for text in texts), str(outcome.error)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("where", range(SIZE))
def test_error_of_a_stage_reaches_every_rank(results: Any, where: int, schedule: str) -> None:
    outcomes = [found[where, schedule] for found in results(stage_raises)]
    assert_all_say(outcomes, ValueError, "boom")
    own = outcomes.pop(where)
    assert type(own.error) is ValueError
    assert own.notes == [f"pipecomm: in stage {where} of 3, F of microbatch 2, iteration 1"]
    for other in outcomes:
        assert isinstance(other.error, StageFailedError)
        assert f"stage {where} of 3, F of microbatch 2, iteration 1: ValueError: boom" in str(
            other.error
        )


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("TypeError", TypeError),
        ("UnicodeError", ValueError),
        ("KeyError", None),
        ("RuntimeError", None),
        ("StopIteration", None),
    ],
)
def test_other_ranks_keep_the_builtin_class_of_value_and_type_errors(
    results: Any, name: str, builtin: type[BaseException] | None
) -> None:
    first, own, last = (found[name] for found in results(stage_raises_other_classes))
    assert type(own.error).__name__ == name
    for other in (first, last):
        assert isinstance(other.error, StageFailedError)
        assert name in str(other.error)
        kept = [base for base in (ValueError, TypeError) if isinstance(other.error, base)]
        assert kept == ([builtin] if builtin else [])


def test_step_after_an_error_equals_unsplit_model(results: Any) -> None:
    assert max(results(step_after_an_error_is_right)) < 1e-5


def test_error_in_backward_reaches_every_rank(results: Any) -> None:
    outcomes = results(backward_raises)
    assert_all_say(outcomes, RuntimeError, "no way back")
    assert outcomes[1].notes == ["pipecomm: in stage 1 of 3, B of microbatch 0, iteration 1"]


def test_error_of_the_loss_reaches_every_rank(results: Any) -> None:
    assert_all_say(results(loss_raises), RuntimeError, str(WIDTH + 1))


def test_keyword_rows_that_differ_are_refused_on_every_rank(results: Any) -> None:
    assert_all_say(results(keyword_rows_differ), ValueError, "[8, 16]", "[9, 1]")


def test_fewer_rows_than_microbatches_are_refused_on_every_rank(results: Any) -> None:
    assert_all_say(results(too_few_rows), ValueError, "3 rows for 4 microbatches")


def test_inputs_that_end_early_end_the_step_before_it_ran(results: Any) -> None:
    outcomes, untouched = zip(*results(inputs_end_early), strict=True)
    assert_all_say(list(outcomes), ValueError, "expected 8 microbatches in inputs; got 5")
    assert all(untouched)


def test_targets_that_end_early_end_the_step_on_every_rank(results: Any) -> None:
    assert_all_say(
        results(targets_end_early), ValueError, "expected 8 microbatches in targets; got 5"
    )


def test_error_of_a_reader_reaches_every_rank(results: Any) -> None:
    outcomes = results(reader_breaks)
    assert_all_say(outcomes, Exception, "disk on fire")
    assert isinstance(outcomes[0].error, OSError)


@pytest.mark.parametrize("kind", UNTRAVELLED)
def test_output_that_cannot_travel_is_refused_on_every_rank(results: Any, kind: str) -> None:
    outcomes = [found[kind] for found in results(outputs_that_cannot_travel)]
    assert_all_say(outcomes, TypeError, f"from stage 1; got {kind} at position 1")


def test_wrong_number_of_stages_is_refused_before_connecting(results: Any) -> None:
    assert_all_say(results(wrong_number_of_stages), ConfigError, "4 stages", "3 in all")


def test_settings_that_differ_are_refused_on_every_rank(results: Any) -> None:
    assert_all_say(results(settings_differ), ConfigError, "4 microbatches", "8 microbatches")


def test_pipeline_over_a_part_of_the_ranks(results: Any) -> None:
    first, outsider, last = results(group_without_this_rank)
    assert isinstance(outsider["raised"], ConfigError)
    assert first == {"place": (0, 2), "loss": None}
    assert last["place"] == (1, 2)
    assert last["loss"] > 0


def test_stage_slower_than_the_timeout_ends_the_step_on_every_rank(results: Any) -> None:
    outcomes = results(slow_stage)
    assert_all_say(outcomes, PipecommError)
    assert any(isinstance(outcome.error, LinkTimeoutError) for outcome in outcomes)


@pytest.mark.parametrize(("odd", "usual"), list(itertools.permutations(CALLS, 2)))
def test_ranks_that_call_different_things_are_told_both(results: Any, odd: str, usual: str) -> None:
    found = [by_case[odd, usual] for by_case in results(calls_differ)]
    told = [error for error in found if error is not None]
    assert told
    for error in told:
        assert isinstance(error, ValueError), error
        assert odd in str(error)
        assert usual in str(error)


def test_failure_after_the_others_are_done_stays_on_its_rank(results: Any) -> None:
    first, second, last = results(failure_after_the_others_are_done)
    assert [found["raised"] for found in (first, second, last)] == [True, False, False]
    assert last["next"] > 0


def test_step_after_close_is_refused(results: Any) -> None:
    assert_all_say(results(step_after_close), PipecommError)


def lose_a_rank(rank: int, size: int, store_path: str) -> Outcome:
    class Dies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            os._exit(7)

    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    stages: list[nn.Module] = linear_stages(size)
    stages[1] = Dies()
    return step_outcome(stages[rank], rows(8), rows(8))


def test_lost_rank_is_named_on_the_others() -> None:
    outcomes = run_ranks(SIZE, lose_a_rank, timeout_s=60)
    assert outcomes.pop(1) == ("died", 7)
    for kind, outcome in outcomes:
        assert kind == "ok"
        # From its own connection, or from the other rank, which heard of it first.
        assert isinstance(outcome.error, (PeerLostError, StageFailedError))
        assert "rank 1" in str(outcome.error)
        assert outcome.seconds < SOON_S
