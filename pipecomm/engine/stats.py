"""What one step on one rank took: seconds, bytes and the events of its timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipecomm.engine.timeline import TimelineEvent
from pipecomm.schedule import Action

if TYPE_CHECKING:
    from pipecomm.links.link import Transfer

__all__ = ["StepStats"]


@dataclass
class StepStats:
    """Measurements of one rank in one step; times in seconds, sizes in bytes.

    `compute_s` was spent in forward and backward passes, also parts of them, `wait_s` in waiting
    for transfers. `exposed_comm_s` is the part of wait_s in which the awaited message was on its
    way; in the rest of it the other side had not produced it yet.

    With tensors of a device these are the host's times: until work is enqueued, not done.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exposed_comm_s: float = 0.0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    wire_nbytes_sent: int = 0
    wire_nbytes_received: int = 0
    # Of asynchronous schedules: the most versions that a stage had of its weights at one time, and
    # updates left out as gradients were not finite.
    weight_versions: int = 1
    updates_left_out: int = 0
    # The most microbatches whose activations were kept at one time, of all stages of the rank.
    peak_activations: int = 0
    events: list[TimelineEvent] = field(default_factory=list)
    _activations: int = field(default=0, repr=False)

    @property
    def bubble(self) -> float:
        """Share of the step in which this rank did not compute."""
        return 1 - self.compute_s / self.step_s if self.step_s > 0 else 0.0

    def add_compute(self, action: Action, start_s: float, end_s: float) -> None:
        self.events.append(TimelineEvent(str(action), "compute", start_s, end_s, _args(action)))
        self.compute_s += end_s - start_s
        self._activations += action.kind.change_in_live
        self.peak_activations = max(self.peak_activations, self._activations)

    def add_transfer(
        self,
        lane: str,
        action: Action,
        transfer: Transfer,
        waited_s: tuple[float, float] | None,
    ) -> None:
        """A finished transfer; `waited_s` is from when to when the compute thread waited for it.

        `action` is the one that sent, or takes, what it brings.
        """
        name = f"{lane} {action.kind.direction} {action.microbatch}"
        args = {
            **_args(action),
            "payload_nbytes": transfer.payload_nbytes,
            "wire_nbytes": transfer.wire_nbytes,
        }
        start_s, end_s = transfer.started_s, transfer.done_s
        self.events.append(TimelineEvent(name, lane, start_s, end_s, args))
        if lane == "send":
            self.payload_nbytes_sent += transfer.payload_nbytes
            self.wire_nbytes_sent += transfer.wire_nbytes
        else:
            self.payload_nbytes_received += transfer.payload_nbytes
            self.wire_nbytes_received += transfer.wire_nbytes
        if waited_s is not None:
            wait_start_s, wait_end_s = waited_s
            self.events.append(
                TimelineEvent(f"wait {name}", "wait", wait_start_s, wait_end_s, args)
            )
            self.wait_s += wait_end_s - wait_start_s
            on_its_way_s = min(wait_end_s, end_s) - max(wait_start_s, start_s)
            self.exposed_comm_s += max(0.0, on_its_way_s)


def _args(action: Action) -> dict[str, Any]:
    return {
        # What works on weights goes nowhere.
        "direction": action.kind.direction or "weights",
        "stage": action.stage,
        "microbatch": action.microbatch,
    }
