"""Carries out one rank's actions of one step; the only place where a pipeline waits.

The actions come from a plan: F, B and I compute and first wait for their own receive; W and U
compute; RECV_* and SEND_* are posted and not waited for. Between two stages of this rank results
stay in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipecomm.codecs.policy import BoundaryCodec
from pipecomm.direction import Direction
from pipecomm.engine.loss import StepLoss
from pipecomm.engine.marks import Marks
from pipecomm.engine.microbatch import Microbatches
from pipecomm.engine.pace import Pace
from pipecomm.engine.plan import Plan
from pipecomm.engine.record import Record
from pipecomm.engine.stage import Stage, as_received
from pipecomm.engine.stats import StepStats
from pipecomm.engine.updates import StageUpdates
from pipecomm.schedule import Action, Hop, Kind

if TYPE_CHECKING:
    from pipecomm.links.link import Links, Transfer

__all__ = ["Step"]

# Stage and microbatch: of the stage that takes what arrives, or that made what is to be sent.
_Key = tuple[Direction, int, int]


class Step:
    """One running step over this rank's `stages`, by index, and the messages of its hops.

    Holds tensors; drop it when the step is over. `current` is the action at work, None before
    the first and after the last. `device` is where the rank computes.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        links: Links | None,
        codecs: Mapping[Hop, BoundaryCodec],
        data: Microbatches,
        loss: StepLoss,
        device: torch.device,
        updates: Mapping[int, StageUpdates] | None = None,
    ) -> None:
        self.record = Record(keeps=plan.trains)
        self.current: Action | None = None
        self._plan = plan
        self._hops_in = plan.placement.hops_in
        self._hops_out = plan.placement.hops_out
        self._stages = stages
        self._devices = {index: stage.device for index, stage in stages.items()}
        self._links = links
        self._codecs = codecs
        self._data = data
        self._loss = loss
        self._updates = updates or {}
        # As many as the sends that may be open where that is bounded.
        self._pace = Pace(device, 2 * plan.placement.num_stages)
        self._marks = Marks(device)
        self._receives: dict[_Key, Transfer] = {}
        self._handed_over: dict[_Key, list[Tensor | None]] = {}
        self._to_send: dict[_Key, Sequence[Tensor | None]] = {}
        self._sends: deque[tuple[Action, Transfer]] = deque()

    @property
    def stats(self) -> StepStats:
        """What the step has taken up to now."""
        return self.record.stats()

    def run(self) -> None:
        """Carry out the plan's actions in order."""
        start_s = time.monotonic()
        carry_out = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weights,
            Kind.U: self._update,
            Kind.RECV_F: self._post_receive,
            Kind.RECV_B: self._post_gradient_receive,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
        }
        with ExitStack() as stack:
            for updates in self._updates.values():
                stack.callback(updates.end)
            for stage in self._stages.values():
                stack.enter_context(stage.step(trains=self._plan.trains, splits=self._plan.splits))
            for action in self._plan.actions:
                self.current = action
                with self._marks.of(action):
                    carry_out[action.kind](action)
        self.current = None
        self.record.step_s += time.monotonic() - start_s

    def drain(self) -> None:
        """Return when everything sent has left; of a device: when that is enqueued there.

        On its current stream.
        """
        start_s = time.monotonic()
        self._limit_sends(0)
        self.record.step_s += time.monotonic() - start_s

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        is_fed = self._hops_in[action.kind][action.stage] is None
        inputs: Any = self._data.inputs[microbatch] if is_fed else self._take(action)
        kwargs = self._data.kwargs[microbatch]
        with self._computing(action):
            outputs = stage.forward(microbatch, inputs, kwargs, self._loss, keeps=self._plan.trains)
        self._pass_on(action, outputs)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        gradients: Sequence[Tensor | None] = ()
        if stage.is_last:
            gradients = [self._loss.start_gradient(microbatch)]
        elif stage.num_gradients(microbatch) > 0:
            gradients = self._take(action)
        with self._computing(action):
            if action.kind is Kind.I:
                results = stage.backward_inputs(microbatch, gradients)
            else:
                reduces = action in self._plan.reducing
                results = stage.backward(microbatch, gradients, reduces=reduces)
        # The stage before knows from its own outputs when no gradient will come.
        if results:
            self._pass_on(action, results)

    def _backward_weights(self, action: Action) -> None:
        with self._computing(action):
            self._stages[action.stage].backward_weights(
                action.microbatch, reduces=action in self._plan.reducing
            )

    def _update(self, action: Action) -> None:
        start_s = time.monotonic()
        updates = self._updates[action.stage]
        was_applied = updates.update(self._plan.versions[action])
        kept = max(self.record.weight_versions, updates.versions.most_kept)
        self.record.weight_versions = kept
        self.record.updates_left_out += not was_applied
        self.record.add_compute(action, start_s, time.monotonic())

    def _pass_on(self, action: Action, tensors: Sequence[Tensor | None]) -> None:
        """To the stage that takes them, or to the SEND that will."""
        hop = self._hops_out[action.kind][action.stage]
        if hop is None:
            return
        if hop.is_message:
            self._to_send[hop.direction, hop.source, action.microbatch] = tensors
        else:
            key = hop.direction, hop.target, action.microbatch
            self._handed_over[key] = as_received(tensors, self._devices[hop.target])

    def _take(self, action: Action) -> list[Tensor | None]:
        """What the stage before or after has made for this action."""
        hop = self._hops_in[action.kind][action.stage]
        assert hop is not None
        key = hop.direction, hop.target, action.microbatch
        if not hop.is_message:
            return self._handed_over.pop(key)
        self._post_receive(action)
        return self._wait("recv", action, self._receives.pop(key))

    def _post_gradient_receive(self, action: Action) -> None:
        """Post it, unless none will come, or the forward is yet to tell."""
        if self._stages[action.stage].num_gradients(action.microbatch) > 0:
            self._post_receive(action)

    def _post_receive(self, action: Action) -> None:
        """Post the receive of what the action, or the one it is for, takes; if it is not."""
        hop = self._hops_in[action.kind][action.stage]
        assert hop is not None
        assert self._links is not None
        key = hop.direction, hop.target, action.microbatch
        if key not in self._receives:
            self._receives[key] = self._links.receive(
                hop.sender,
                direction=hop.direction,
                microbatch=action.microbatch,
                stage=hop.target,
                device=self._devices[hop.target],
            )

    def _send(self, action: Action) -> None:
        hop = self._hops_out[action.kind][action.stage]
        assert hop is not None
        assert self._links is not None
        tensors = self._to_send.pop((hop.direction, hop.source, action.microbatch), ())
        if not tensors:
            return
        if self._plan.max_open_sends is not None:
            self._limit_sends(self._plan.max_open_sends)
        boundary = self._codecs[hop]
        transfer = self._links.send(
            hop.receiver,
            tensors,
            direction=hop.direction,
            microbatch=action.microbatch,
            stage=hop.target,
            codec=boundary.choose(action.microbatch, tensors, trains=self._plan.trains),
            min_nbytes=boundary.min_nbytes,
        )
        self._sends.append((action, transfer))

    def _limit_sends(self, max_open: int) -> None:
        while self._sends and (len(self._sends) > max_open or self._sends[0][1].is_done):
            self._wait("send", *self._sends.popleft())

    def _wait(self, lane: str, action: Action, transfer: Transfer) -> list[Tensor | None]:
        was_done = transfer.is_done
        start_s = time.monotonic()
        with self._marks.of(f"wait {lane} {action.stage}"):
            tensors = transfer.wait()
        waited_s = None if was_done else (start_s, time.monotonic())
        self.record.add_transfer(lane, action, transfer, waited_s)
        return tensors

    @contextmanager
    def _computing(self, action: Action) -> Iterator[None]:
        start_s = time.monotonic()
        updates = self._updates.get(action.stage)
        if updates is None:
            yield
        else:
            with updates.versions.using(self._plan.versions[action]):
                yield
        self.record.add_compute(action, start_s, time.monotonic())
        self._pace.add()
