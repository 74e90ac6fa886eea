"""What all ranks must have or do alike: as text, compared in one way, reported in one form.

Settings are compared once, when ranks connect, through the store. What a section of steps does is
said by its first messages, which costs no round of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipecomm.errors import ConfigError

__all__ = ["check_settings", "check_title", "title_tensor"]

# More is no title.
_MAX_TITLE_NBYTES = 1000


def check_settings(by_rank: Sequence[str], rank: int, group: str) -> None:
    """Raise ConfigError, the same on every rank but for its place, unless all are equal."""
    for peer, settings in enumerate(by_rank):
        _require_same(
            "the same settings on every rank",
            (f"'{by_rank[0]}'", "rank 0"),
            (f"'{settings}'", f"rank {peer}"),
            f"; where: rank {rank}, process group '{group}'; give every rank the same options",
        )


def title_tensor(title: str) -> Tensor:
    """The title, which is not empty, as a message carries it behind its tensors: uint8 [bytes]."""
    return torch.frombuffer(bytearray(title.encode()), dtype=torch.uint8)


def check_title(own: str, sent: Tensor | None, peer: int) -> None:
    """Raise ConfigError unless `peer` sent the title that this rank has.

    Whatever it sent: it may run another version.
    """
    _require_same(
        "every rank to run the same", (own, "this rank"), (_title_of(sent), f"rank {peer}"), ""
    )


def _require_same(
    expected: str, first: tuple[str, str], second: tuple[str, str], more: str
) -> None:
    if first[0] != second[0]:
        raise ConfigError(
            f"expected {expected}; got {first[0]} on {first[1]} and {second[0]} on {second[1]}"
            f"{more}"
        )


def _title_of(sent: Tensor | None) -> str:
    if sent is None or sent.dtype != torch.uint8 or sent.dim() != 1:
        return "something else"
    if sent.numel() > _MAX_TITLE_NBYTES:
        return "something else"
    return bytes(sent.tolist()).decode(errors="replace")
