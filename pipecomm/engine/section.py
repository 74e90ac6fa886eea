"""What all ranks begin and end together: an error in it on one rank ends it on every rank.

A step is a section; so are the choice of codecs and clipping, which exchange messages too. The
transport counts sections (its epochs), all ranks alike; users count iterations, the training steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipecomm.engine.failures import Failure
from pipecomm.errors import ConfigError, PipecommError, StageFailedError

if TYPE_CHECKING:
    from pipecomm.links.link import Links

__all__ = ["Sections"]


class Sections:
    """Opens one section after the other on `rank`, over `links`; None: this rank is alone."""

    def __init__(self, rank: int, links: Links | None) -> None:
        self._rank = rank
        self._links = links
        self._num_sections = 0
        self._is_closed = False

    def close(self) -> None:
        """No section can be opened any more."""
        self._is_closed = True

    @contextlib.contextmanager
    def open(
        self, title: str, where: Callable[[], str], iteration: int | None = None
    ) -> Iterator[None]:
        """The block is a section. `title` says what it does and must be the same on every rank.

        What the block raises is raised, as StageFailedError, on the other ranks, and names what
        `where` then gives: where this rank was ("stage 1 of 3, F of microbatch 2"), which is
        added as a note here. `iteration` is the user's number of it, if it has one.
        Raises ConfigError once it is closed.
        """
        if self._is_closed:
            raise ConfigError("expected an open pipeline; got one that has been closed")
        self._num_sections += 1
        try:
            if self._links is not None:
                self._links.begin_step(self._num_sections, title, iteration)
            yield
        except StageFailedError as error:
            # Passed on: this rank may be gone before the failed one's own word is everywhere.
            self._abort(str(error))
            failure = Failure.unpacked(str(error))
            raise (error if failure is None else failure.error()) from None
        except BaseException as error:
            place = where()
            if hasattr(error, "add_note"):
                error.add_note(f"pipecomm: in {place}")
            self._abort(Failure.of(error, self._rank, place).packed())
            raise

    def _abort(self, text: str) -> None:
        # The links may be what failed; the error at hand says more than theirs.
        if self._links is not None:
            with contextlib.suppress(PipecommError):
                self._links.abort(text)
