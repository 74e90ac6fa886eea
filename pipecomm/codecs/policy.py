"""Which codec a boundary uses and when: by place, by step, by the link's speed, by its error."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pipecomm.codecs.codec import Codec
from pipecomm.errors import ConfigError
from pipecomm.settings import MIN_NBYTES

__all__ = ["AUTO", "BoundaryCodec", "CodecPolicy", "Codecs", "codec_for_speed"]

AUTO = "auto"
_RAW = Codec("raw")
# What may name the codecs of a pipeline.
Codecs: TypeAlias = "str | Codec | Sequence[str | Codec] | CodecPolicy"
_log = logging.getLogger("pipecomm")
# Bytes per second of a link that a codec does not help: what one does on one core. A busy machine
# makes links look slower, so "auto" takes a codec only by a margin below it.
_FAST_LINK = 2e9
_SURELY_SLOW = 0.75


@dataclass(frozen=True)
class CodecPolicy:
    """A codec for each boundary, boundary k lying between stage k and stage k + 1.

    `CodecPolicy("int4", boundaries=range(10), warmup_steps=100)`: the first ten boundaries in
    4 bits, from step 100 on; all else raw. Tensors that are not floats always pass bit for bit.

    Attributes:
        codec: of every boundary, or one for each. "auto" chooses by the link's speed.
        boundaries: those that use `codec`; the others stay raw. Default: all.
        keep_ends_raw: the first and the last boundary stay raw.
        warmup_steps: training steps at the start that stay raw.
        min_nbytes: smaller tensors stay raw. Default: 4096.
        guard_every: steps between two measurements of the relative L2 error; 0 = none.
        guard_limit: a boundary whose error is above it goes back to raw for good, with a warning.

    Raises ConfigError for an unknown name and for a number out of range.
    """

    codec: str | Codec | Sequence[str | Codec] = "raw"
    boundaries: Collection[int] | None = None
    keep_ends_raw: bool = False
    warmup_steps: int = 0
    min_nbytes: int = MIN_NBYTES.default
    guard_every: int = 0
    guard_limit: float = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", _canonical(self.codec))
        if self.boundaries is not None:
            is_collection = isinstance(self.boundaries, Collection)
            if not is_collection or any(type(one) is not int for one in self.boundaries):
                raise ConfigError(f"boundaries: expected whole numbers; got {self.boundaries!r}")
            object.__setattr__(self, "boundaries", tuple(sorted(set(self.boundaries))))
        for name in ("warmup_steps", "min_nbytes", "guard_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: expected a whole number of at least 0; got {value!r}")
        if not isinstance(self.guard_limit, (int, float)) or not self.guard_limit > 0:
            raise ConfigError(f"guard_limit: expected more than 0; got {self.guard_limit!r}")

    @classmethod
    def parse(cls, spec: Codecs) -> CodecPolicy:
        """The policy a user named: by a codec, by one codec for each boundary, or as it is."""
        return spec if isinstance(spec, CodecPolicy) else cls(spec)

    def __str__(self) -> str:
        """What all ranks must agree on; for a plain codec its name."""
        if self == CodecPolicy(self.codec):
            return ", ".join(self.names)
        return repr(self)

    @property
    def names(self) -> tuple[str, ...]:
        """All codecs it names."""
        return (self.codec,) if isinstance(self.codec, str) else tuple(map(str, self.codec))  # type: ignore[arg-type]

    def check(self, num_boundaries: int) -> None:
        """Raise ConfigError for a boundary or a list that does not fit this many boundaries."""
        if not isinstance(self.codec, str) and len(self.names) != num_boundaries:
            raise ConfigError(
                f"expected one codec, or one for each of {num_boundaries} boundaries; got "
                f"{len(self.names)}"
            )
        for boundary in self.boundaries or ():
            if not 0 <= boundary < num_boundaries:
                raise ConfigError(
                    f"expected boundaries from 0 to {num_boundaries - 1}; got {boundary!r}"
                )

    def at(self, boundary: int, num_boundaries: int) -> str:
        """The name of the boundary's codec, or "auto"."""
        is_end = boundary in (0, num_boundaries - 1)
        is_left_out = self.boundaries is not None and boundary not in self.boundaries
        if is_left_out or (self.keep_ends_raw and is_end):
            return "raw"
        return self.names[0 if isinstance(self.codec, str) else boundary]


def _canonical(codec: str | Codec | Sequence[str | Codec]) -> str | tuple[str, ...]:
    """The name, or the names, in the one form that ranks compare."""
    if isinstance(codec, (list, tuple)):
        return tuple(_canonical_name(one) for one in codec)
    return _canonical_name(codec)  # type: ignore[arg-type]


def _canonical_name(codec: str | Codec) -> str:
    return AUTO if codec == AUTO else str(Codec.parse(codec))


def codec_for_speed(bytes_per_s: float) -> Codec:
    """What "auto" takes for a boundary: 8 bits where a codec surely gains, else raw.

    Fewer bits cost accuracy (docs/codecs.md), so they have to be asked for.
    """
    return Codec("int8") if bytes_per_s < _SURELY_SLOW * _FAST_LINK else _RAW


class BoundaryCodec:
    """A policy at work: what one direction of one boundary uses now. Belongs to the sender."""

    def __init__(self, policy: CodecPolicy, codec: Codec, where: str) -> None:
        self._policy = policy
        self._codec = codec
        self._where = where
        self._num_steps = 0

    @property
    def codec(self) -> Codec:
        """What training steps use after the warm-up, as long as the guard lets them."""
        return self._codec

    @property
    def min_nbytes(self) -> int:
        return self._policy.min_nbytes

    def begin_step(self) -> None:
        """Count a training step."""
        self._num_steps += 1

    def choose(self, microbatch: int, tensors: Sequence[Tensor | None], *, trains: bool) -> Codec:
        """The codec for this message; measures its error first when the guard is due.

        `trains`: in a training step; an evaluation uses what the next one will.
        """
        num_steps_before = self._num_steps - 1 if trains else self._num_steps
        if num_steps_before < self._policy.warmup_steps:
            return _RAW
        every = self._policy.guard_every
        is_due = every > 0 and microbatch == 0 and num_steps_before % every == 0
        if is_due and trains and not self._codec.is_raw:
            self._guard(tensors)
        return self._codec

    def _guard(self, tensors: Sequence[Tensor | None]) -> None:
        errors = [
            relative_error(self._codec, tensor)
            for tensor in tensors
            if tensor is not None and self._codec.covers(tensor, self.min_nbytes)
        ]
        # Values that are not finite arrive as such: they say nothing about the codec.
        worst = max((error for error in errors if error == error), default=0.0)
        if worst <= self._policy.guard_limit:
            return
        _log.warning(
            "%s: codec %s has a relative error of %.3g in step %d, above the limit of %.3g; "
            "this boundary is raw from now on",
            self._where, self._codec, worst, self._num_steps, self._policy.guard_limit,
        )  # fmt: skip
        self._codec = _RAW


def relative_error(codec: Codec, x: Tensor) -> float:
    """|decode(encode(x)) - x| / |x| in the L2 norm; 0 for zeros, NaN where x is not finite."""
    back = codec.decode(codec.encode(x), torch.empty(x.shape, dtype=x.dtype, device=x.device))
    exact = x.detach().double()
    norm = torch.linalg.vector_norm(exact)
    return float(torch.linalg.vector_norm(back.double() - exact) / norm) if norm > 0 else 0.0
