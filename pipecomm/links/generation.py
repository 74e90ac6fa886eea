"""Who meets whom through a store: ranks sit down in a numbered generation, and the newest counts.

               generation 0       generation 1
    rank 0     came, and ended    comes again, finds its seat taken and begins a generation
    rank 1     waits          ->  hears of it and moves on
    rank 2     never came         comes late, and sits down in the newest

So a job that starts again on the same store never waits for processes of an earlier attempt, and
the next pipeline or group of a process never takes those of the last for its own. Knows nothing
of how ranks connect.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

from pipecomm.errors import StageFailedError, TransportError

__all__ = ["NewGenerationError", "Seat", "Store"]

# Apart from keys that hold a generation's own things.
_NEWEST = "pipecomm/generation"
_LOOK_S = 0.1


class NewGenerationError(Exception):
    """The others are to be met in a newer generation: take() again."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Seat:
    """This process as `rank` of those who meet through `store`; in the newest generation at first.

    Constructing and take() raise TransportError where another process has come as this rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.generation = 0
        self._arrivals_key = f"pipecomm/arrivals/{rank}"
        self._arrival = store.add(self._arrivals_key, 1)
        self._next_look_s = 0.0
        self.take()

    def key(self, name: str) -> str:
        """The store's key of that name, in this generation."""
        return f"pipecomm/{self.generation}/{name}"

    def take(self) -> None:
        """Sit down in the newest generation, or in a new one where this rank's seat is taken."""
        while True:
            self._check_not_replaced()
            self.generation = self.store.add(_NEWEST, 0)
            if self.store.add(self.key(f"seat/{self.rank}"), 1) == 1:
                return
            self.begin_next()

    def begin_next(self) -> None:
        """Have everybody who still waits in this generation move on."""
        self.store.compare_set(_NEWEST, str(self.generation), str(self.generation + 1))

    def announce(self, text: str) -> None:
        """Tell the others of this generation that this rank will not connect; they raise `text`.

        The first rank's text counts. A store that cannot be reached has nobody to tell.
        """
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(self.key("failed"), "", text)

    def look(self) -> None:
        """Raise StageFailedError when a rank has announced a failure, NewGenerationError when a
        newer generation has begun. Asks the store ten times a second, however often it is called;
        one that cannot be reached says nothing.
        """
        if time.monotonic() < self._next_look_s:
            return
        try:
            has_failed = self.store.check([self.key("failed")])
            text = self.store.get(self.key("failed")).decode() if has_failed else ""
            newest = int(self.store.get(_NEWEST))
        except RuntimeError:
            return
        finally:
            self._next_look_s = time.monotonic() + _LOOK_S
        if has_failed:
            raise StageFailedError(text)
        if newest != self.generation:
            raise NewGenerationError

    def _check_not_replaced(self) -> None:
        arrivals = self.store.add(self._arrivals_key, 0)
        if arrivals != self._arrival:
            raise TransportError(
                f"expected to be the only process with rank {self.rank}; got another one that has "
                f"come later and takes its place; end what is left of an earlier attempt"
            )
