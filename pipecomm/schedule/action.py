"""One action of a schedule, and its text form: that of torch.distributed.pipelining."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from pipecomm.errors import ConfigError

__all__ = ["Action", "Kind", "Ranks"]


class Kind(enum.Enum):
    """What an action does. A schedule holds F and B; the other four are derived from them."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        return self is Kind.F or self is Kind.B


_TEXT = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` on `stage` for `microbatch`; printed as `0F3`, `1B0`, `2RECV_F1`.

    A SEND carries the stage that sends, a RECV the stage that receives.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`. Raises ConfigError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"expected an action as stage, kind, microbatch (0F3, 1B0); got {text!r}"
            )
        stage, kind, microbatch = match.groups()
        if kind not in Kind.__members__:
            hint = "; a backward split into I and W is not offered" if kind in ("I", "W") else ""
            known = ", ".join(Kind.__members__)
            raise ConfigError(f"expected one of the kinds {known}; got {kind!r} in {text!r}{hint}")
        return cls(Kind[kind], int(stage), int(microbatch))


Ranks = tuple[tuple[Action, ...], ...]
