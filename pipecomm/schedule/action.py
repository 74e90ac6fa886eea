"""One action of a schedule: its kind with its traits, and its text form, torch's."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pipecomm.direction import Direction
from pipecomm.errors import ConfigError

__all__ = ["KINDS", "RECEIVES", "SENDS", "Action", "Direction", "Kind"]


class Kind(enum.Enum):
    """What an action does. A schedule holds F, B, I, W and U; SEND and RECV are derived from them.

    B is a whole backward; I (gradients of the inputs) and W (of the weights) are its two parts.
    U updates the weights of its stage with the gradients of all microbatches up to its own that
    no update has used yet; a schedule without any is followed by one update of all stages.
    Everything that depends on the kind is read from its traits:

    index: its number, by which tables of kinds are read.
    role: whether it computes (is_compute), sends (is_send) or receives.
    direction: where its message goes; a compute kind takes one that way and makes the next. None
        for a kind that needs nothing from other stages and makes nothing for them.
    after: one of these must have run before on the same stage with the same microbatch; none of
        them: nothing must.
    change_in_live: of the activations that its stage keeps: 1 keeps one, -1 lets one go.
    """

    is_compute: bool
    is_send: bool
    direction: Direction | None
    index: int
    _after: str
    change_in_live: int

    F = ("F", "compute", "forward", "", 1)
    B = ("B", "compute", "backward", "F", -1)
    I = ("I", "compute", "backward", "F", 0)  # noqa: E741  (torch's letter)
    W = ("W", "compute", None, "I", -1)
    U = ("U", "compute", None, "BW", 0)
    SEND_F = ("SEND_F", "send", "forward", "", 0)
    RECV_F = ("RECV_F", "receive", "forward", "", 0)
    SEND_B = ("SEND_B", "send", "backward", "", 0)
    RECV_B = ("RECV_B", "receive", "backward", "", 0)

    def __new__(
        cls,
        text: str,
        role: Literal["compute", "send", "receive"],
        direction: Direction | None,
        after: str,
        change_in_live: int,
    ) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = text
        kind.index = len(cls.__members__)
        kind.is_compute = role == "compute"
        kind.is_send = role == "send"
        kind.direction = direction
        kind._after = after
        kind.change_in_live = change_in_live
        return kind

    @property
    def after(self) -> tuple[Kind, ...]:
        return tuple(Kind[letter] for letter in self._after)

    # enum's own hashes the name in Python; kinds are looked up for every action.
    __hash__ = object.__hash__


# By their index.
KINDS = tuple(Kind)
SENDS: Mapping[Direction, Kind] = {"forward": Kind.SEND_F, "backward": Kind.SEND_B}
RECEIVES: Mapping[Direction, Kind] = {"forward": Kind.RECV_F, "backward": Kind.RECV_B}

_TEXT = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})", re.ASCII)


class Action(NamedTuple):
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
            known = ", ".join(Kind.__members__)
            raise ConfigError(f"expected one of the kinds {known}; got {kind!r} in {text!r}")
        return cls(Kind[kind], int(stage), int(microbatch))
