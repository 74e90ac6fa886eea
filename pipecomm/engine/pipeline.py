"""Trains the stages of one rank: places them, splits the batch, runs the schedule.

Knows links (messages between ranks), not how their bytes travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm.codecs.policy import BoundaryCodec, CodecPolicy, Codecs
from pipecomm.device import as_device
from pipecomm.direction import Direction
from pipecomm.engine.arguments import check_arguments, chunks_of, policies_of, settings_text
from pipecomm.engine.backward import warm_up_backward
from pipecomm.engine.choice import ScheduleChoice
from pipecomm.engine.connect import (
    announce_failure,
    check_num_stages,
    choose_codecs,
    codecs_by_direction,
    connect_stages,
    rank_and_size,
)
from pipecomm.engine.failures import place_text
from pipecomm.engine.grad_norm import clip_grad_norm
from pipecomm.engine.loss import LossFn, LossRule, Reduction
from pipecomm.engine.microbatch import split_step
from pipecomm.engine.plan import AUTO, Plan, check_schedule, evaluation_plan, training_plan
from pipecomm.engine.report import StepReport, gather_report, peak_memory_nbytes
from pipecomm.engine.result import StepResult
from pipecomm.engine.section import Sections
from pipecomm.engine.shared_parameters import counted_elsewhere
from pipecomm.engine.split_backward import OpenBackward
from pipecomm.engine.stage import Stage
from pipecomm.engine.step import Step
from pipecomm.engine.updates import (
    StageUpdates,
    Updates,
    UpdatesWeights,
    check_optimizer,
    updates_of_stages,
)
from pipecomm.errors import ConfigError
from pipecomm.schedule import Action, Hop, Schedule

if TYPE_CHECKING:
    from pipecomm.links.limits import FlowLimits
    from pipecomm.links.link import LinkEmulation
    from pipecomm.memory.pool import MemoryPool

__all__ = ["Pipeline", "StepResult"]


class Pipeline:
    """A model split over ranks; this object is what one rank has of it.

    `stage` is the module of this rank's stage, or a list of modules, one for each of its stages
    in the order that the schedule's placement gives them to it (with "interleaved" on P ranks,
    rank r has stages r, r + P, ...). Ranks count in `process_group` (default: torch.distributed's
    default group; where that is not initialised, there is one rank). Every rank constructs a
    Pipeline with the same settings and then calls the same methods in the same order.

    schedule "auto" begins with 1F1B (interleaved for several stages of a rank), measures the second
    step and takes, for the third, the fastest schedule of no more activations by its simulation; it
    chooses again where steps take 10 % more or less than that.

    `loss_fn(output, target)` is used on the last stage. With loss_reduction "mean" a microbatch's
    loss weighs by its share of the rows, with "sum" the losses are added. `codec` is for
    activations, `grad_codec` for their gradients: one for all boundaries, a list with one for
    each, "auto", or a CodecPolicy; inside a rank nothing is encoded. A transfer not done in
    `timeout_s` is an error. `limits` bound what each link takes before its sender waits.

    What arrives is put on `device`; by default where the stage's first parameter or buffer lies,
    for a stage without any on torch's default device.

    Raises ConfigError for an unknown name, and for a number of stages that does not fit the ranks
    or the schedule; connecting may raise TransportError or LinkTimeoutError.
    """

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        *,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        loss_fn: LossFn | None = None,
        loss_reduction: Reduction = "mean",
        codec: Codecs = "raw",
        grad_codec: Codecs = "raw",
        process_group: dist.ProcessGroup | None = None,
        num_stages: int | None = None,
        updates: Updates | None = None,
        timeout_s: float = 1800.0,
        emulation: LinkEmulation | None = None,
        pool: MemoryPool | None = None,
        limits: FlowLimits | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        rank, size = rank_and_size(process_group)
        self._rank = rank
        scale = 1.0 if updates is None else updates.loss_scale
        self._loss = LossRule(loss_fn, loss_reduction, scale)
        self._pool = pool
        try:
            check_arguments(loss_fn, loss_reduction, timeout_s)
            order = self._take_stages(stage, schedule, num_microbatches, size, device, updates)
            check_num_stages(num_stages, order.num_stages, size)
            policies = policies_of(codec, grad_codec, order.placement.num_boundaries)
        except BaseException as error:
            announce_failure(process_group, rank, size, error)
            raise
        self._choice = ScheduleChoice(order) if schedule == AUTO else None
        agreed = settings_text(order, policies, updates, is_chosen=self._choice is not None)
        self._links = connect_stages(
            process_group, rank, size, agreed, timeout_s, emulation, pool, limits, self.device
        )
        self._sections = Sections(rank, self._links)
        self._num_iterations = 0
        self._codecs = self._choose_codecs(policies, emulation)

    def _take_stages(
        self,
        stage: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule,
        num_microbatches: int,
        size: int,
        device: torch.device | str | None,
        updates: Updates | None,
    ) -> Schedule:
        """Make this rank's stages and plan; give the schedule that they follow."""
        chunks = chunks_of(stage)
        order = check_schedule(schedule, len(chunks), self._rank, size, num_microbatches)
        named = None if device is None else as_device(device)
        own = dict(zip(order.placement.stages_of(self._rank), chunks, strict=True))
        open_backward = OpenBackward()
        self._stages = {
            index: Stage(chunk, index, order.num_stages, named, open_backward)
            for index, chunk in own.items()
        }
        self._updates = updates_of_stages(own, order.weights, updates)
        self._schedule = order
        self._plan = training_plan(order, self._rank)
        if order.num_stages > 1:
            warm_up_backward()
        return order

    def _choose_codecs(
        self, policies: Mapping[Direction, CodecPolicy], emulation: LinkEmulation | None
    ) -> dict[Hop, BoundaryCodec]:
        """Together with the other ranks; where that fails, this one is closed."""
        if self._links is None:
            return {}
        try:
            with self._sections.open("the start", self._where):
                placement = self._plan.placement
                return choose_codecs(self._links, placement, policies, self.device, emulation)
        except BaseException:
            self.close()
            raise

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of this rank's activations ("forward") and gradients ("backward") now.

        The last stage sends no activations, the first no gradients. A rank of several stages has
        one for each boundary that it sends over, in their order: "int4, raw".
        """
        return codecs_by_direction(self._codecs)

    @property
    def device(self) -> torch.device:
        """Where what arrives is put, for the first stage of this rank."""
        return next(iter(self._stages.values())).device

    @property
    def _has_ends(self) -> tuple[bool, bool]:
        """Whether the first stage is here, and whether the last."""
        return 0 in self._stages, self.num_stages - 1 in self._stages

    @property
    def num_microbatches(self) -> int:
        """Of a training step."""
        return self._plan.num_microbatches

    @property
    def stage_indices(self) -> tuple[int, ...]:
        """The stages of this rank, from 0, in the order of its modules."""
        return tuple(self._stages)

    @property
    def stage_index(self) -> int:
        """The stage of this rank, from 0; of several, the first."""
        return self.stage_indices[0]

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self._plan.placement.num_stages

    @property
    def schedule(self) -> Schedule:
        """What a training step runs; with "auto" what it does now."""
        return self._schedule

    @property
    def is_asynchronous(self) -> bool:
        """Whether train_step updates the weights, for which it takes the optimizer."""
        return self._plan.is_asynchronous

    def train_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        loss_divisor: float | Tensor | None = None,
        return_outputs: bool = False,
        optimizer: UpdatesWeights | None = None,
    ) -> StepResult:
        """Run every microbatch forward and backward; gradients are added to the parameters' .grad.

        `inputs` (a tensor, or a tuple of positional arguments) are used on the first stage,
        `targets` on the last, each rank's `kwargs` on all stages of its own. Every tensor in
        them is split along dim 0, in whatever container pytree or a dict can rebuild, but for
        what is marked ForEveryMicrobatch; a list or an iterator holds ready microbatches instead.
        `loss_divisor` divides the loss, for losses normalised by something other than rows.

        An asynchronous schedule updates the weights within the step, with the `optimizer` of this
        rank's stages: gradients are cleared first and after each update, a mean is of the
        microbatches of one update, and when the step is over all its updates are done.

        Raises what this stage raised, with stage, microbatch and iteration added as a note; on the
        other ranks StageFailedError, which is also a ValueError, TypeError or MemoryError where
        the original is.
        Clear the gradients after an error; the next step works again unless a rank is gone.
        """
        self._num_iterations += 1
        self._choose_schedule()
        number = self.num_microbatches
        given = (inputs, targets, kwargs, loss_divisor, return_outputs, optimizer)
        result = self._run(True, number, *given)
        if self._choice is not None:
            self._choice.note(result)
        return result

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
        return self._run(False, number, inputs, targets, kwargs, None, return_outputs, None)

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

        Raises ConfigError for max_norm < 0, norm_type <= 0 and a name that one rank alone has,
        TensorError for copies whose values or gradients differ; errors travel as in train_step.
        """
        sharing = "" if shared is None else " and shared"
        title = f"clip_grad_norm_ with norm_type={norm_type}{sharing}"
        with self._sections.open(title, self._where):
            modules = [stage.module for stage in self._stages.values()]
            # What two stages of this rank share counts once.
            parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
            others = counted_elsewhere(shared, parameters, self._rank, self._gather)
            return clip_grad_norm(
                parameters, max_norm, norm_type, self._gather, counted_elsewhere=others
            )

    def report(self, result: StepResult) -> StepReport:
        """What the step took on all ranks, beside what its schedule makes of the measured times.

        Every rank calls this with its result of the same training step; a small message goes up
        through all ranks and back, so not while a step is to be timed. Errors as in train_step.
        """
        with self._sections.open("report", self._where):
            nbytes = peak_memory_nbytes(self.device, self._pool)
            return gather_report(result.stats, nbytes, self._schedule, self._gather)

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent; no step can run afterwards."""
        self._sections.close()
        if self._links is not None:
            self._links.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self,
        trains: bool,
        num_microbatches: int,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None,
        loss_divisor: float | Tensor | None,
        return_outputs: bool,
        optimizer: UpdatesWeights | None,
    ) -> StepResult:
        title = f"{'train' if trains else 'eval'}_step with num_microbatches={num_microbatches}"
        running: list[Step] = []
        iteration = self._num_iterations if trains else None

        def where() -> str:
            return self._where(running[-1].current if running else None, iteration)

        with self._sections.open(title, where, iteration), torch.set_grad_enabled(trains):
            plan = self._plan_of(trains, num_microbatches, optimizer)
            has_first, has_last = self._has_ends
            data = split_step(inputs, targets, kwargs, num_microbatches, takes_inputs=has_first)
            loss = self._loss.of_step(
                data, plan.updates, loss_divisor, is_here=has_last, keep_outputs=return_outputs
            )
            updates = self._begin(plan, optimizer) if trains else {}
            step = Step(
                plan, self._stages, self._links, self._codecs, data, loss, self.device, updates
            )
            running.append(step)
            step.run()
            step.drain()
            return StepResult(loss.total(), loss.outputs(), step.record)

    def _begin(self, plan: Plan, optimizer: UpdatesWeights | None) -> Mapping[int, StageUpdates]:
        """What lasts longer than a training step is told that one begins; gives the updates."""
        for index, updates in self._updates.items():
            assert optimizer is not None
            updates.begin(optimizer, plan.uses(index))
        for boundary in self._codecs.values():
            boundary.begin_step()
        return self._updates

    def _choose_schedule(self) -> None:
        if self._choice is None or not self._choice.is_due(self._num_iterations):
            return
        with self._sections.open("choice of a schedule", self._where):
            chosen = self._choice.choose(self._num_iterations, self._gather)
        if chosen is not None:
            self._schedule = chosen
            self._plan = training_plan(chosen, self._rank)

    def _plan_of(
        self, trains: bool, num_microbatches: int, optimizer: UpdatesWeights | None
    ) -> Plan:
        if not trains:
            return evaluation_plan(self._plan.placement, num_microbatches, self._rank)
        if self._loss.loss_fn is None and self._has_ends[1]:
            raise ConfigError("expected a loss_fn on the last stage for train_step; got None")
        check_optimizer(optimizer, is_asynchronous=self._plan.is_asynchronous)
        return self._plan

    def _gather(self, value: Tensor) -> list[Tensor]:
        """Every rank's, by rank, inside a section."""
        return [value] if self._links is None else self._links.gather(value)

    def _where(self, current: Action | None = None, iteration: int | None = None) -> str:
        """For errors; `iteration` counts the user's training steps, from 1."""
        return place_text(self.stage_indices, self.num_stages, current, iteration)
