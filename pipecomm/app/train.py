"""One rank of `pipecomm train`: trains a byte-level GPT on its stage, once or twice, and measures.

All ranks run `train` with the same options. The last rank, which alone knows the loss, reports.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pipecomm.app.arguments import AUTO_LINK
from pipecomm.app.data import Corpus, load_corpus
from pipecomm.app.gpt import GptConfig, GptStage, byte_loss, layers_of_stage
from pipecomm.app.rank import JobRank
from pipecomm.codecs.policy import CodecPolicy
from pipecomm.direction import Direction
from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.plan import check_schedule
from pipecomm.engine.report import StepReport
from pipecomm.engine.result import StepResult
from pipecomm.engine.stats import StepStats
from pipecomm.engine.timeline import TimelineEvent, draw_timeline, write_trace
from pipecomm.errors import ConfigError
from pipecomm.links.link import LinkEmulation
from pipecomm.outcome import Event
from pipecomm.schedule import Placement, Schedule

__all__ = ["TrainOptions", "train"]

_T = TypeVar("_T")

# The chosen link carries the raw activations of a microbatch in this many times its compute.
_AUTO_TRANSFER_SHARE = 2.0
_NUM_CALIBRATIONS = 20
_NUM_WARMUP_STEPS = 20
# The reported training loss is the mean of the last steps: one batch alone says little.
_NUM_FINAL_STEPS = 10
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class TrainOptions:
    """What `pipecomm train` was asked for. `stages`: ranks, each of `stages_per_rank` stages of the
    model. link_mbps: 0 = the real path, AUTO_LINK = choose.
    """

    stages: int
    microbatches: int
    batch_size: int
    steps: int
    layers: int
    width: int
    heads: int
    sequence_length: int
    learning_rate: float
    seed: int
    schedule: str
    codec: str
    grad_codec: str
    compare: bool
    link_mbps: float
    link_latency_ms: float
    data: Path | None
    held_out_batches: int
    timeout_s: float
    out: Path
    stages_per_rank: int = 1

    @property
    def model(self) -> GptConfig:
        return GptConfig(self.layers, self.width, self.heads, self.sequence_length)

    @property
    def num_stages(self) -> int:
        """Of the model, over all ranks."""
        return self.stages * self.stages_per_rank

    @functools.cached_property
    def order(self) -> Schedule:
        """The first one, if it is chosen by what steps take.

        Raises ConfigError for an unknown schedule, and one without a form of this size.
        """
        size = self.stages_per_rank, 0, self.stages, self.microbatches
        return check_schedule(self.schedule, *size)

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Codec and gradient codec of each training."""
        chosen = (self.codec, self.grad_codec)
        return [("raw", "raw"), chosen] if self.compare else [chosen]

    def check(self) -> None:
        """Raise ConfigError for all that can be known to fail before any rank starts."""
        layers_of_stage(self.model.num_layers, 0, self.num_stages)
        _ = self.order
        for name in (self.codec, self.grad_codec):
            CodecPolicy.parse(name)
        if self.compare and self.runs[0] == self.runs[1]:
            raise ConfigError("--compare: expected a codec to compare with raw; got raw and raw")
        if self.batch_size < self.microbatches:
            raise ConfigError(
                f"expected at least one row per microbatch; got --batch-size {self.batch_size} "
                f"for {self.microbatches} microbatches"
            )
        load_corpus(self.data, self.sequence_length)
        _make_folder(self.out)


def train(options: TrainOptions, me: JobRank, report: Callable[[Event], None]) -> None:
    """Train and measure on this rank, inside the default process group.

    The rank of the last stage, which alone knows the loss, gives `report` a "start", then a "step"
    event per step, then the "result".
    """
    corpus = load_corpus(options.data, options.sequence_length)
    _require_same_text(corpus)
    emulation = _choose_link(options, me)
    about = {
        "data": corpus.description,
        "link": {
            "is_emulated": emulation is not None,
            **asdict(emulation or LinkEmulation()),
            "text": _describe_link(emulation),
        },
        "num_steps": options.steps,
    }
    is_reporter = options.order.placement.last_rank == me.rank
    if is_reporter:
        report({"event": "start", **about})
    runs = [_Run(options, me, corpus, emulation, codecs) for codecs in options.runs]
    results = [run.train(report) for run in runs]
    if is_reporter:
        report({"event": "result", **about, "runs": results})


class _Run:
    """One training from fresh weights; the same seed gives the same weights and batches."""

    def __init__(
        self,
        options: TrainOptions,
        me: JobRank,
        corpus: Corpus,
        emulation: LinkEmulation | None,
        codecs: tuple[str, str],
    ) -> None:
        self._options = options
        self._me = me
        self._corpus = corpus
        self._emulation = emulation
        self._codec, self._grad_codec = codecs
        self._name = self._codec if len({*codecs}) == 1 else "+".join(codecs)
        self._placement = options.order.placement
        self._is_reporter = self._placement.last_rank == me.rank
        self._stages = nn.ModuleList(
            GptStage(options.model, stage, options.num_stages, options.seed)
            for stage in self._placement.stages_of(me.rank)
        )
        self._optimizer = torch.optim.AdamW(
            self._stages.parameters(), betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        self._report: StepReport | None = None
        self._losses: list[float] = []
        self._stats: list[StepStats] = []
        self._held_out_losses: list[float] = []
        self._codecs_in_use: dict[str, str] = {}

    def train(self, report: Callable[[Event], None]) -> dict[str, Any]:
        """Run all steps and the evaluation; give what was measured, the same on every rank."""
        start_s = time.monotonic()
        with self._connect() as pipeline:
            for step in range(self._options.steps):
                result = self._step(pipeline, step)
                if step == self._options.steps - 1:
                    self._report = pipeline.report(result)
                if self._is_reporter:
                    report(self._progress(step, time.monotonic() - start_s))
            for index in range(self._options.held_out_batches):
                self._evaluate(pipeline, index)
            self._codecs_in_use = pipeline.codecs
        return self._summary()

    def _connect(self) -> Pipeline:
        return Pipeline(
            list(self._stages),
            schedule=self._options.schedule,
            num_microbatches=self._options.microbatches,
            loss_fn=byte_loss,
            codec=self._codec,
            grad_codec=self._grad_codec,
            timeout_s=self._options.timeout_s,
            emulation=self._emulation,
        )

    def _step(self, pipeline: Pipeline, step: int) -> StepResult:
        options = self._options
        for group in self._optimizer.param_groups:
            group["lr"] = _learning_rate(options, step)
        size, length = options.batch_size, options.sequence_length
        given = self._corpus.batch(step, size, length, options.seed)
        if pipeline.is_asynchronous:
            result = pipeline.train_step(*given, optimizer=self._optimizer)
        else:
            result = pipeline.train_step(*given)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._stats.append(result.stats)
        if result.loss is not None:
            self._losses.append(result.loss)
        return result

    def _evaluate(self, pipeline: Pipeline, index: int) -> None:
        size, length = self._options.batch_size, self._options.sequence_length
        result = pipeline.eval_step(*self._corpus.held_out_batch(index, size, length))
        if result.loss is not None:
            self._held_out_losses.append(result.loss)

    def _progress(self, step: int, elapsed_s: float) -> Event:
        # Every boundary carries the same shapes, so those of this rank stand for all.
        own = sum(stats.wire_nbytes_sent + stats.wire_nbytes_received for stats in self._stats)
        messages = [hop for hop in self._placement.hops if hop.is_message]
        num_own = sum(self._me.rank in (hop.sender, hop.receiver) for hop in messages)
        num_tokens = (step + 1) * self._options.batch_size * self._options.sequence_length
        return {
            "event": "step",
            "run": self._name,
            "step": step + 1,
            "loss": self._losses[-1],
            "tokens_per_s": num_tokens / elapsed_s,
            "wire_nbytes": own * len(messages) // max(num_own, 1),
        }

    def _summary(self) -> dict[str, Any]:
        ranks = _gather(self._stats_without_events())
        steps = list(zip(*ranks, strict=True))
        step_s = [max(one.step_s for one in step) for step in steps]
        typical = min(range(len(steps)), key=lambda k: abs(step_s[k] - statistics.median(step_s)))
        events = _gather(self._stats[typical].events)
        losses = _gather((self._losses, self._held_out_losses))[self._placement.last_rank]
        num_tokens = self._options.batch_size * self._options.sequence_length
        in_use = _gather(self._codecs_in_use)
        return {
            "name": self._name,
            "codec": self._codec,
            "grad_codec": self._grad_codec,
            "codecs": _by_boundary(in_use, self._placement, "forward"),
            "grad_codecs": _by_boundary(in_use, self._placement, "backward"),
            "first_loss": losses[0][0],
            "train_loss": statistics.fmean(losses[0][-_NUM_FINAL_STEPS:]),
            "held_out_loss": statistics.fmean(losses[1]),
            "step_s": statistics.median(step_s),
            "tokens_per_s": num_tokens / statistics.median(step_s),
            "bubble": _typical_mean(steps, lambda one: one.bubble),
            "exposed_comm_s": _typical_mean(steps, lambda one: one.exposed_comm_s),
            "payload_nbytes_sent": sum(one.payload_nbytes_sent for step in steps for one in step),
            "wire_nbytes_sent": sum(one.wire_nbytes_sent for step in steps for one in step),
            "schedule": self._report.schedule if self._report else self._options.schedule,
            "last_step": _last_step(self._report),
            "files": self._write_timeline(events, typical) if self._is_reporter else [],
        }

    def _stats_without_events(self) -> list[StepStats]:
        return [replace(stats, events=[]) for stats in self._stats]

    def _write_timeline(self, events: list[list[TimelineEvent]], step: int) -> list[str]:
        by_rank = dict(enumerate(events))
        stem = self._options.out / f"timeline-{self._name}"
        trace, picture = stem.with_suffix(".json"), stem.with_suffix(".png")
        write_trace(trace, by_rank)
        if find_spec("matplotlib") is None:
            return [str(trace)]
        title = f"{self._options.schedule}, {self._name}, step {step + 1}"
        draw_timeline(picture, by_rank, f"{title} ({_describe_link(self._emulation)})")
        return [str(picture), str(trace)]


def _last_step(report: StepReport | None) -> dict[str, Any]:
    """What the last training step took, by rank, and planned with the same times."""
    assert report is not None
    return {
        "planned_step_s": report.planned.step_s,
        "planned_bubble": report.planned.bubble,
        "ranks": [{**asdict(rank), "bubble": rank.bubble} for rank in report.ranks],
        "text": str(report),
    }


def _by_boundary(
    in_use: Sequence[Mapping[str, str]], placement: Placement, direction: Direction
) -> list[str]:
    """The codec of each boundary, of `Pipeline.codecs` by rank; raw inside a rank."""
    names = [iter(codecs.get(direction, "").split(", ")) for codecs in in_use]
    hops = [placement.hop_over(k, direction) for k in range(placement.num_boundaries)]
    return [next(names[hop.sender]) if hop.is_message else "raw" for hop in hops]


def _describe_link(emulation: LinkEmulation | None) -> str:
    """The link, in the words that go wherever one of its numbers is shown."""
    if emulation is None:
        return "real link"
    bandwidth = f"{emulation.mbps:g} Mbit/s" if emulation.mbps else "unlimited"
    return f"emulated link: {bandwidth}, {emulation.latency_ms:g} ms"


def _learning_rate(options: TrainOptions, step: int) -> float:
    """Linear warmup, then a cosine down to zero."""
    warmup = min(1.0, (step + 1) / _NUM_WARMUP_STEPS)
    return options.learning_rate * warmup * (1 + math.cos(math.pi * step / options.steps)) / 2


def _require_same_text(corpus: Corpus) -> None:
    prints = _gather(corpus.fingerprint)
    if len(set(prints)) > 1:
        raise ConfigError(
            f"--data: expected the same text on every rank; got checksums {prints} by rank; "
            "copy one folder to all machines"
        )


def _choose_link(options: TrainOptions, me: JobRank) -> LinkEmulation | None:
    if me.size == 1 or not (options.link_mbps or options.link_latency_ms):
        return None
    mbps = options.link_mbps
    if mbps == AUTO_LINK:
        rows = math.ceil(options.batch_size / options.microbatches)
        compute_s = max(_gather(_compute_s(options, me, rows)))
        nbytes = 4 * rows * options.sequence_length * options.width
        mbps = float(f"{nbytes * 8 / 1e6 / (_AUTO_TRANSFER_SHARE * compute_s):.2g}")
    return LinkEmulation(mbps=mbps, latency_ms=options.link_latency_ms)


def _compute_s(options: TrainOptions, me: JobRank, rows: int) -> float:
    """Seconds of this stage's forward and backward of one microbatch, all ranks at work.

    The least of several: what else the machine does for a moment must not choose the link.
    """
    index = options.order.placement.stages_of(me.rank)[0]
    stage = GptStage(options.model, index, options.num_stages, options.seed)
    x = torch.zeros(rows, options.sequence_length, dtype=torch.int64)
    if index > 0:
        x = torch.randn(*x.shape, options.width, requires_grad=True)
    dist.barrier()
    times = []
    for _ in range(_NUM_CALIBRATIONS):
        start_s = time.monotonic()
        stage(x).sum().backward()
        times.append(time.monotonic() - start_s)
    return min(times)


def _typical_mean(
    steps: Sequence[Sequence[StepStats]], value: Callable[[StepStats], float]
) -> float:
    """Median over steps of the mean over ranks."""
    return statistics.median(statistics.fmean(map(value, step)) for step in steps)


def _gather(value: _T) -> list[_T]:
    """Every rank's value, by rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: expected a folder to write to; got {path}: {error.strerror}; give another one"
        ) from error
