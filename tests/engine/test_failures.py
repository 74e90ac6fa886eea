"""An error's fields, told to the other ranks as text that nothing else is taken for."""

from __future__ import annotations

import pytest

from pipecomm.engine.failures import Failure, place_text
from pipecomm.errors import ConfigError, PoolExhaustedError, StageFailedError, TensorError
from pipecomm.schedule import Action


def told(error: BaseException) -> StageFailedError:
    """The error as another rank raises it."""
    failure = Failure.unpacked(Failure.of(error, 1, "stage 3").packed())
    assert failure is not None
    assert failure.rank == 1
    return failure.error()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "stage 3: ValueError: boom"),
        (ConfigError("boom"), "stage 3: ConfigError [ValueError]: boom"),
        (RuntimeError("boom"), "stage 3: RuntimeError: boom"),
        (KeyError("boom"), "stage 3: KeyError: 'boom'"),
    ],
)
def test_text_has_place_class_and_message(error: Exception, text: str) -> None:
    assert str(Failure.of(error, 1, "stage 3")) == text
    assert str(told(error)) == text


@pytest.mark.parametrize("kind", [ValueError, ConfigError, TensorError, UnicodeError])
def test_value_errors_stay_value_errors(kind: type[Exception]) -> None:
    assert isinstance(told(kind("boom")), ValueError)
    assert isinstance(told(kind("boom")), StageFailedError)


@pytest.mark.parametrize("kind", [MemoryError, PoolExhaustedError])
def test_memory_errors_stay_memory_errors(kind: type[Exception]) -> None:
    assert isinstance(told(kind("boom")), MemoryError)
    assert isinstance(told(kind("boom")), StageFailedError)


def test_type_errors_stay_type_errors() -> None:
    assert isinstance(told(TypeError("boom")), TypeError)


@pytest.mark.parametrize(
    "error", [RuntimeError("ValueError: quoted"), RuntimeError("stage: TypeError: x"), OSError()]
)
def test_other_errors_do_not_become_what_their_text_mentions(error: Exception) -> None:
    assert type(told(error)) is StageFailedError


@pytest.mark.parametrize("text", ["", "é" * 9, "\0" * 20_000, 'ValueError: [x] {"kind": 1}'])
def test_any_text_fits_the_message_and_comes_back(text: str) -> None:
    packed = Failure.of(ValueError(text), 0, "stage 3").packed()
    assert len(packed.encode()) < 32 << 10
    failure = Failure.unpacked(packed)
    assert failure is not None
    assert failure.text.startswith(text[:5000])


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "boom",
        "[]",
        "{}",
        '{"rank": 1, "place": "p", "kind": "k", "base": "", "text": 7}',
        '{"rank": true, "place": "p", "kind": "k", "base": "", "text": "t"}',
        '{"rank": 1, "place": "p", "kind": "k", "base": "SystemExit", "text": "t"}',
        '{"rank": 1, "place": "p", "kind": "k", "base": "", "text": "t", "more": 1}',
    ],
)
def test_other_text_is_not_taken_for_a_failure(packed: str) -> None:
    assert Failure.unpacked(packed) is None


@pytest.mark.parametrize(
    ("stages", "current", "iteration", "text"),
    [
        ((1,), None, None, "stage 1 of 4"),
        ((0, 2), None, 7, "stages 0 and 2 of 4, iteration 7"),
        ((0, 2), "2F3", 7, "stage 2 of 4, F of microbatch 3, iteration 7"),
    ],
)
def test_place_names_the_stage_at_work(
    stages: tuple[int, ...], current: str | None, iteration: int | None, text: str
) -> None:
    action = None if current is None else Action.parse(current)
    assert place_text(stages, 4, action, iteration) == text
