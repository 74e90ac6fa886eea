"""Carries out one rank's actions of one step; the only place where a pipeline waits.

The actions come from a schedule: F and B compute and first wait for their own receive; RECV_* and
SEND_* are posted and not waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipecomm.codecs.policy import BoundaryCodec
from pipecomm.engine.microbatch import Microbatches
from pipecomm.engine.pace import Pace
from pipecomm.engine.stage import Head, Stage
from pipecomm.engine.stats import Direction, StepStats
from pipecomm.schedule import Action, Kind

if TYPE_CHECKING:
    from pipecomm.links.link import Links, Transfer

__all__ = ["Step"]


class Step:
    """One running step. Holds tensors; drop it when the step is over.

    `current` is the action at work, None before the first and after the last. What arrives is put
    on `device`.
    """

    def __init__(
        self,
        stage: Stage,
        links: Links | None,
        codecs: Mapping[Direction, BoundaryCodec],
        data: Microbatches,
        head: Head,
        device: torch.device,
    ) -> None:
        self.stats = StepStats()
        self.current: Action | None = None
        self._stage = stage
        self._links = links
        self._codecs = codecs
        self._data = data
        self._head = head
        self._device = device
        # As many as the sends that may be open.
        self._pace = Pace(device, 2 * stage.num_stages)
        self._last_backward: int | None = None
        self._receives: dict[tuple[Direction, int], Transfer] = {}
        self._results: dict[tuple[Direction, int], tuple[Tensor | None, ...]] = {}
        self._sends: deque[tuple[Direction, int, Transfer]] = deque()

    def run(self, actions: Sequence[Action]) -> None:
        """Carry out the actions in order; return when everything sent has left.

        With tensors of a device: when all of that is enqueued on its current stream.
        """
        start_s = time.monotonic()
        carry_out = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.RECV_F: self._post_activation_receive,
            Kind.RECV_B: self._post_gradient_receive,
            Kind.SEND_F: self._send_activation,
            Kind.SEND_B: self._send_gradient,
        }
        backwards = [action.microbatch for action in actions if action.kind is Kind.B]
        self._last_backward = backwards[-1] if backwards else None
        with self._stage.step():
            for action in actions:
                self.current = action
                carry_out[action.kind](action.microbatch)
        self.current = None
        self._limit_sends(0)
        self.stats.step_s = time.monotonic() - start_s

    def _forward(self, microbatch: int) -> None:
        inputs: Any = self._data.inputs[microbatch]
        if not self._stage.is_first:
            inputs = self._receive("forward", microbatch)
        kwargs = self._data.kwargs[microbatch]
        with self._computing(Kind.F, "forward", microbatch):
            outputs = self._stage.forward(microbatch, inputs, kwargs, self._head)
        self._results["forward", microbatch] = outputs

    def _backward(self, microbatch: int) -> None:
        gradients: Any = ()
        if self._stage.num_gradients(microbatch) > 0:
            self._post_gradient_receive(microbatch)
            gradients = self._receive("backward", microbatch)
        with self._computing(Kind.B, "backward", microbatch):
            results = self._stage.backward(
                microbatch, gradients, ends_step=microbatch == self._last_backward
            )
        self._results["backward", microbatch] = results

    def _post_activation_receive(self, microbatch: int) -> None:
        self._post_receive("forward", microbatch)

    def _post_gradient_receive(self, microbatch: int) -> None:
        """Post it, unless it is posted, none will come, or the forward is yet to tell."""
        is_posted = ("backward", microbatch) in self._receives
        if not is_posted and self._stage.num_gradients(microbatch) > 0:
            self._post_receive("backward", microbatch)

    def _send_activation(self, microbatch: int) -> None:
        self._send("forward", microbatch)

    def _send_gradient(self, microbatch: int) -> None:
        # The stage before knows from its own outputs when no gradient will come.
        if self._results["backward", microbatch]:
            self._send("backward", microbatch)

    def _post_receive(self, direction: Direction, microbatch: int) -> None:
        assert self._links is not None
        source = self._stage.index + (-1 if direction == "forward" else 1)
        self._receives[direction, microbatch] = self._links.receive(
            source, direction=direction, microbatch=microbatch, device=self._device
        )

    def _receive(self, direction: Direction, microbatch: int) -> list[Tensor | None]:
        transfer = self._receives.pop((direction, microbatch))
        return self._wait("recv", direction, microbatch, transfer)

    def _send(self, direction: Direction, microbatch: int) -> None:
        assert self._links is not None
        # Bounds what waits to leave where nothing comes back that would hold this rank up.
        self._limit_sends(2 * self._stage.num_stages)
        tensors = self._results.pop((direction, microbatch))
        boundary = self._codecs[direction]
        transfer = self._links.send(
            self._stage.index + (1 if direction == "forward" else -1),
            tensors,
            direction=direction,
            microbatch=microbatch,
            codec=boundary.choose(microbatch, tensors),
            min_nbytes=boundary.min_nbytes,
        )
        self._sends.append((direction, microbatch, transfer))

    def _limit_sends(self, max_open: int) -> None:
        while self._sends and (len(self._sends) > max_open or self._sends[0][2].is_done):
            self._wait("send", *self._sends.popleft())

    def _wait(
        self, lane: str, direction: Direction, microbatch: int, transfer: Transfer
    ) -> list[Tensor | None]:
        was_done = transfer.is_done
        start_s = time.monotonic()
        tensors = transfer.wait()
        waited_s = None if was_done else (start_s, time.monotonic())
        self.stats.add_transfer(lane, direction, microbatch, transfer, waited_s)
        return tensors

    @contextmanager
    def _computing(self, kind: Kind, direction: Direction, microbatch: int) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        name = str(Action(kind, self._stage.index, microbatch))
        self.stats.add_compute(name, direction, microbatch, start_s, time.monotonic())
        self._pace.add()
