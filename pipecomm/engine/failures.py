"""What a rank tells the others of its error: typed fields, as text that is checked when it is read.

So an error keeps its builtin class on its way, whatever words it or its place is made of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from pipecomm.errors import StageFailedError
from pipecomm.schedule import Action

__all__ = ["Failure", "place_text"]


class _RemoteValueError(StageFailedError, ValueError):
    pass


class _RemoteTypeError(StageFailedError, TypeError):
    pass


class _RemoteMemoryError(StageFailedError, MemoryError):
    pass


_BASES: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "MemoryError": MemoryError,
}
_REMOTE: dict[str, type[StageFailedError]] = {
    "ValueError": _RemoteValueError,
    "TypeError": _RemoteTypeError,
    "MemoryError": _RemoteMemoryError,
    "": StageFailedError,
}
# A message about a failure is cut at 32 KiB, and a character takes 6 bytes at most.
_MAX_CHARACTERS = 5000


@dataclass(frozen=True)
class Failure:
    """`where` it happened, in words. `base`: the builtin class that is kept, or ""."""

    rank: int
    where: str
    kind: str
    base: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str) -> Failure:
        base = next((name for name, kept in _BASES.items() if isinstance(error, kept)), "")
        text = str(error)
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]}... ({len(text)} characters)"
        return cls(rank, where, type(error).__name__, base, text)

    def packed(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def unpacked(cls, packed: str) -> Failure | None:
        """What packed() gave; None for any other text."""
        try:
            values = json.loads(packed)
        except ValueError:
            return None
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            return None
        if any(type(values[name]) is not kind for name, kind in kinds.items()):
            return None
        return cls(**values) if values["base"] in _REMOTE else None

    def __str__(self) -> str:
        """`stage 1 of 3, F of microbatch 2: ConfigError [ValueError]: <text>`."""
        kept = f" [{self.base}]" if self.base not in ("", self.kind) else ""
        return f"{self.where}: {self.kind}{kept}: {self.text}"

    def error(self) -> StageFailedError:
        """As another rank raises it: also a ValueError, TypeError or MemoryError if it was one."""
        return _REMOTE[self.base](str(self))


def place_text(
    stages: Sequence[int], num_stages: int, current: Action | None, iteration: int | None
) -> str:
    """Where the rank of `stages` is: "stage 1 of 3, F of microbatch 2, iteration 4"."""
    named = stages if current is None else (current.stage,)
    plural = "s" if len(named) > 1 else ""
    where = f"stage{plural} {' and '.join(map(str, named))} of {num_stages}"
    if current is not None:
        where += f", {current.kind.value} of microbatch {current.microbatch}"
    return where if iteration is None else f"{where}, iteration {iteration}"
