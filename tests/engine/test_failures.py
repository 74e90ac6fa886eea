"""An error's class and text, told to the other ranks as text."""

from __future__ import annotations

import pytest

from pipecomm.engine.failures import describe, with_builtin_class
from pipecomm.errors import ConfigError, PoolExhaustedError, StageFailedError, TensorError

WHERE = r"stage \d+"


def told(error: BaseException) -> StageFailedError:
    """The error as another rank raises it."""
    return with_builtin_class(StageFailedError(describe(error, "stage 3")), WHERE)


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
    assert describe(error, "stage 3") == text
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
