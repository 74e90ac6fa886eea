"""Keeps an error's builtin class on its way to the other ranks, which get its text only."""

from __future__ import annotations

import re

from pipecomm.errors import StageFailedError

__all__ = ["describe", "with_builtin_class"]


class _RemoteValueError(StageFailedError, ValueError):
    pass


class _RemoteTypeError(StageFailedError, TypeError):
    pass


class _RemoteMemoryError(StageFailedError, MemoryError):
    pass


_KEPT_CLASSES: dict[type[BaseException], type[StageFailedError]] = {
    ValueError: _RemoteValueError,
    TypeError: _RemoteTypeError,
    MemoryError: _RemoteMemoryError,
}


def describe(error: BaseException, where: str) -> str:
    """The text for the other ranks: "<where>: ConfigError [ValueError]: <text>"."""
    name = type(error).__name__
    base = next((base for base in _KEPT_CLASSES if isinstance(error, base)), type(error))
    kept = "" if base is type(error) else f" [{base.__name__}]"
    return f"{where}: {name}{kept}: {error}"


def with_builtin_class(error: StageFailedError, where: str) -> StageFailedError:
    """`error`, made a ValueError, TypeError or MemoryError too if describe() says so.

    `where` is a regular expression for the place given to describe().
    """
    for base, kept in _KEPT_CLASSES.items():
        if re.search(rf"{where}: (\w+ \[)?{base.__name__}\]?: ", str(error)):
            return kept(*error.args)
    return error
