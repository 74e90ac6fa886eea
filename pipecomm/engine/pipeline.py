"""Trains one stage of a model on each rank: places it, splits the batch, runs the schedule.

Knows links (messages between stages), not how their bytes travel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.codecs.policy import BoundaryCodec, CodecPolicy, Codecs
from pipecomm.device import as_device, device_of
from pipecomm.engine.data_parallel import check_wrappers
from pipecomm.engine.failures import describe, with_builtin_class
from pipecomm.engine.grad_norm import clip_grad_norm
from pipecomm.engine.loss import LossFn, Reduction, StepLoss, loss_weights
from pipecomm.engine.microbatch import split_step
from pipecomm.engine.place import (
    announce_failure,
    check_num_stages,
    choose_codecs,
    connect_stages,
    find_place,
)
from pipecomm.engine.shared_parameters import counted_elsewhere
from pipecomm.engine.stage import Stage, warm_up_backward
from pipecomm.engine.stats import Direction, StepStats
from pipecomm.engine.step import Step
from pipecomm.errors import ConfigError, PipecommError, StageFailedError
from pipecomm.schedule import Action, Kind, Schedule, build, with_communication

if TYPE_CHECKING:
    from pipecomm.links.limits import FlowLimits
    from pipecomm.links.link import LinkEmulation, Links
    from pipecomm.memory.pool import MemoryPool

__all__ = ["Pipeline", "StepResult"]

# What _explain calls a place.
_WHERE = r"stage \d+ of \d+[^:]*"


@dataclass
class StepResult:
    """`loss` and `outputs` (a list, one per microbatch, detached) exist on the last stage only."""

    loss: float | None
    outputs: list[Any] | None
    stats: StepStats


class Pipeline:
    """A model split over ranks, one stage on each; this object is the stage of this rank.

    The stage's index is the rank in `process_group` (default: torch.distributed's default group;
    where that is not initialised, a pipeline of one stage). Every rank constructs a Pipeline with
    the same settings and then calls the same methods in the same order.

    `loss_fn(output, target)` is used on the last stage. With loss_reduction "mean" a microbatch's
    loss weighs by its share of the rows, with "sum" the losses are added. `codec` is for
    activations, `grad_codec` for their gradients: one for all boundaries, a list with one for
    each, "auto", or a CodecPolicy. A transfer not done in `timeout_s` is an error.
    `limits` bound what each link takes before its sender waits.

    What arrives is put on `device`; by default where the stage's first parameter or buffer lies,
    for a stage without any on torch's default device.

    Raises ConfigError for an unknown name and for a number of stages that is not the number of
    ranks; connecting may raise TransportError or LinkTimeoutError.
    """

    def __init__(
        self,
        stage: nn.Module,
        *,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        loss_fn: LossFn | None = None,
        loss_reduction: Reduction = "mean",
        codec: Codecs = "raw",
        grad_codec: Codecs = "raw",
        process_group: dist.ProcessGroup | None = None,
        num_stages: int | None = None,
        timeout_s: float = 1800.0,
        emulation: LinkEmulation | None = None,
        pool: MemoryPool | None = None,
        limits: FlowLimits | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        rank, size = find_place(process_group)
        self._links: Links | None = None
        try:
            check_num_stages(num_stages, size)
            _check_arguments(stage, loss_fn, loss_reduction, timeout_s)
            self._device = None if device is None else as_device(device)
            policies = _policies(codec, grad_codec, size - 1)
            plan = _plan(schedule, size, num_microbatches)
            self._actions = with_communication(plan)[rank]
            self._stage = Stage(stage, rank, size)
            if size > 1:
                warm_up_backward()
        except BaseException as error:
            announce_failure(process_group, rank, size, error)
            raise
        self.num_microbatches = plan.num_microbatches
        self._loss_fn = loss_fn
        self._loss_reduction: Reduction = loss_reduction
        self._num_steps = 0
        self._is_closed = False
        self._codecs: dict[Direction, BoundaryCodec] = {}
        if size > 1:
            codecs = f"codecs {policies['forward']} and {policies['backward']}"
            self._links = connect_stages(
                process_group,
                rank,
                size,
                settings=f"schedule {plan.name}, {plan.num_microbatches} microbatches, {codecs}",
                timeout_s=timeout_s,
                emulation=emulation,
                pool=pool,
                limits=limits,
                device=self.device,
            )
            try:
                with self._shared_step("the start"):
                    self._codecs = choose_codecs(self._links, policies, self.device, emulation)
            except BaseException:
                self.close()
                raise

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of this stage's activations ("forward") and gradients ("backward") now.

        The last stage sends no activations, the first no gradients.
        """
        return {direction: str(boundary.codec) for direction, boundary in self._codecs.items()}

    @property
    def device(self) -> torch.device:
        """Where what arrives is put."""
        return self._device or device_of(self._stage.module)

    @property
    def stage_index(self) -> int:
        """The stage of this rank, from 0."""
        return self._stage.index

    @property
    def num_stages(self) -> int:
        """Stages, and ranks, of the whole pipeline."""
        return self._stage.num_stages

    def train_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        loss_divisor: float | Tensor | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        """Run every microbatch forward and backward; gradients are added to the parameters' .grad.

        `inputs` (a tensor, or a tuple of positional arguments) are used on the first stage,
        `targets` on the last, each rank's `kwargs` on its own stage. Every tensor in them is split
        along dim 0, in whatever container pytree or a dict can rebuild, but for what is marked
        ForEveryMicrobatch; a list or an iterator holds ready microbatches instead.
        `loss_divisor` divides the loss, for losses normalised by something other than rows.

        Raises what this stage raised, with stage and microbatch added as a note; on the other
        ranks StageFailedError, which is also a ValueError, TypeError or MemoryError where the
        original is.
        Clear the gradients after an error; the next step works again unless a rank is gone.
        """
        with torch.enable_grad():
            return self._run(
                self.num_microbatches, inputs, targets, kwargs, loss_divisor, return_outputs
            )

    def eval_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        num_microbatches: int | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        """As train_step, without gradients and backward passes; the module's mode is left alone.

        `num_microbatches`, the same on every rank, may differ from that of training. Without a
        loss_fn the result's loss is None.
        """
        number = self.num_microbatches if num_microbatches is None else num_microbatches
        with torch.no_grad():
            return self._run(number, inputs, targets, kwargs, None, return_outputs)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        shared: Mapping[str, nn.Parameter] | None = None,
    ) -> float:
        """Clip the gradients of all stages by their common norm; every rank calls this.

        Returns the norm before clipping, the same bits on every rank: sum over all stages of
        |g|^p, to the power 1/p, with p = `norm_type`; infinity takes the largest |g|. Where it
        is larger than `max_norm`, every gradient is scaled in place by max_norm / norm. A stage
        without gradients counts 0. A norm that is not finite scales nothing: test it, and leave
        out the optimizer's step, on every rank alike. DTensors count with all their shards.

        `shared` gives parameters of this stage, of which others have copies, the name that they
        have there too; they count once. Every rank gives a mapping, {} if it has none, or none.

        Raises ConfigError for max_norm < 0, norm_type <= 0 and a name that one stage alone has,
        TensorError for copies whose values or gradients differ; errors travel as in train_step.
        """
        sharing = "" if shared is None else " and shared"
        with self._shared_step(f"clip_grad_norm_ with norm_type={norm_type}{sharing}"):
            gather = _alone if self._links is None else self._links.gather
            parameters = list(self._stage.module.parameters())
            others = (
                []
                if shared is None
                else counted_elsewhere(shared, parameters, self.stage_index, gather)
            )
            return clip_grad_norm(parameters, max_norm, norm_type, gather, counted_elsewhere=others)

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent; no step can run afterwards."""
        self._is_closed = True
        if self._links is not None:
            self._links.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        num_microbatches: int,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None,
        loss_divisor: float | Tensor | None,
        return_outputs: bool,
    ) -> StepResult:
        """One step, training if gradients are enabled."""
        method = "train_step" if torch.is_grad_enabled() else "eval_step"
        with self._shared_step(f"{method} with num_microbatches={num_microbatches}") as running:
            actions = self._actions_for(num_microbatches)
            data = split_step(
                inputs, targets, kwargs, num_microbatches, takes_inputs=self._stage.is_first
            )
            loss = StepLoss(
                self._loss_fn,
                data.targets,
                # Elsewhere nobody needs to wait for a device's divisor.
                loss_weights(
                    data, self._loss_reduction, loss_divisor if self._stage.is_last else None
                ),
                keep_outputs=return_outputs and self._stage.is_last,
            )
            if torch.is_grad_enabled():
                for boundary in self._codecs.values():
                    boundary.begin_step()
            step = Step(self._stage, self._links, self._codecs, data, loss, self.device)
            running.append(step)
            step.run(actions)
            return StepResult(loss.total(), loss.outputs(), step.stats)

    @contextlib.contextmanager
    def _shared_step(self, plan: str) -> Iterator[list[Step]]:
        """What all ranks do together: whatever is raised inside ends it on every rank.

        `plan` must be the same on every rank. The block puts the Step that runs, if any, into
        the list it is given.
        """
        if self._is_closed:
            raise ConfigError("expected an open pipeline; got one that has been closed")
        self._num_steps += 1
        running: list[Step] = []
        try:
            if self._links is not None:
                self._links.begin_step(self._num_steps, plan)
            yield running
        except StageFailedError as error:
            # Passed on: this rank may be gone before the failed one's own word is everywhere.
            self._abort(str(error))
            raise with_builtin_class(error, _WHERE) from None
        except BaseException as error:
            self._abort(self._explain(error, running[-1].current if running else None))
            raise

    def _actions_for(self, num_microbatches: int) -> tuple[Action, ...]:
        if not torch.is_grad_enabled():
            return _forward_only(self.num_stages, num_microbatches)[self.stage_index]
        if self._stage.is_last and self._loss_fn is None:
            raise ConfigError("expected a loss_fn on the last stage for train_step; got None")
        return self._actions

    def _abort(self, text: str) -> None:
        # The links may be what failed; the error at hand says more than theirs.
        if self._links is not None:
            with contextlib.suppress(PipecommError):
                self._links.abort(text)

    def _explain(self, error: BaseException, current: Action | None) -> str:
        """The text for the other ranks; the reader of the traceback here gets the place."""
        where = f"stage {self.stage_index} of {self.num_stages}"
        if current is not None:
            where += f", {current.kind.value} of microbatch {current.microbatch}"
        if hasattr(error, "add_note"):
            error.add_note(f"pipecomm: in {where}")
        return describe(error, where)


def _alone(value: Tensor) -> list[Tensor]:
    return [value]


def _check_arguments(stage: Any, loss_fn: Any, loss_reduction: Any, timeout_s: Any) -> None:
    if not isinstance(stage, nn.Module):
        raise ConfigError(f"expected an nn.Module as stage; got {type(stage).__name__}")
    check_wrappers(stage)
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"expected a function as loss_fn; got {loss_fn!r}")
    if loss_reduction not in get_args(Reduction):
        raise ConfigError(f'expected loss_reduction "mean" or "sum"; got {loss_reduction!r}')
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ConfigError(f"expected timeout_s of more than 0 s; got {timeout_s!r}")


def _policies(
    codec: Codecs, grad_codec: Codecs, num_boundaries: int
) -> dict[Direction, CodecPolicy]:
    policies: dict[Direction, CodecPolicy] = {
        "forward": CodecPolicy.parse(codec),
        "backward": CodecPolicy.parse(grad_codec),
    }
    for policy in policies.values():
        policy.check(num_boundaries)
    return policies


def _plan(schedule: str | Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    """The checked schedule, with stage k on rank k."""
    if isinstance(schedule, str):
        return build(schedule, num_stages, num_microbatches)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"expected the name of a schedule or a Schedule; got {schedule!r}")
    if schedule.num_stages != num_stages or len(schedule.ranks) != num_stages:
        raise ConfigError(
            f"expected a schedule of {num_stages} stages on {num_stages} ranks; got "
            f"{schedule.num_stages} stages on {len(schedule.ranks)} ranks ({schedule.name})"
        )
    if num_microbatches not in (1, schedule.num_microbatches):
        raise ConfigError(
            f"expected num_microbatches as in the schedule, {schedule.num_microbatches}; "
            f"got {num_microbatches}"
        )
    schedule.check()
    others = sorted(kind.value for kind in schedule.kinds - {Kind.F, Kind.B})
    if others:
        raise ConfigError(
            f"expected a schedule of F and B; got {', '.join(others)} in {schedule.name!r}: "
            "backwards split into I and W can be checked and simulated, not yet executed"
        )
    if any(action.stage != rank for rank, row in enumerate(schedule.ranks) for action in row):
        raise ConfigError(f"expected stage k on rank k in {schedule!r}; got another order")
    return schedule


@functools.lru_cache(maxsize=16)
def _forward_only(num_stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    return with_communication(build("gpipe", num_stages, num_microbatches).forward_only())
