"""What do quantized boundaries change in training? A byte-level GPT in four stages, by codec."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import add_save_option, progress, report
from torch import Tensor, nn

from pipecomm.app.data import Corpus, load_corpus
from pipecomm.app.gpt import GptConfig, GptStage, byte_loss
from pipecomm.codecs.ops import through

NUM_STAGES = 4
MODEL = GptConfig(num_layers=4, width=128, num_heads=4, sequence_length=64)
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 50
# Steps of one point of a curve: one batch alone says little.
POINT = 25
# Codec of the activations and of their gradients. "per tensor" is one scale for a whole tensor,
# as it is often done; nothing of pipecomm does that.
VARIANTS = {
    "raw": ("raw", "raw"),
    "int8 / int8": ("int8", "int8"),
    "int4 / int8": ("int4", "int8"),
    "int4 hadamard / int8": ("int4:hadamard=64", "int8"),
    "int4 spikes / int8": ("int4:spikes=1", "int8"),
    "nf4 spikes / int8": ("nf4:spikes=1", "int8"),
    "int4 hadamard / int4 hadamard, stochastic": (
        "int4:hadamard=64",
        "int4:hadamard=64,rounding=stochastic",
    ),
    "int8 per tensor (naive)": ("per tensor", "per tensor"),
}


@dataclass(frozen=True)
class Job:
    """One training. Variants of one seed share weights and batches."""

    variant: str
    seed: int
    num_steps: int
    num_held_out_batches: int


@dataclass(frozen=True)
class Outcome:
    """`curve` is the mean training loss of each POINT steps.

    `held_out` is the loss at the end, `held_out_raw` that of the same weights without codecs.
    """

    job: Job
    curve: list[float]
    held_out: float
    held_out_raw: float


class PerTensor(torch.autograd.Function):
    """8 bits with one scale for the tensor, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return quantize_per_tensor(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return quantize_per_tensor(gradient)


def quantize_per_tensor(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round().clamp(-127, 127) * scale if scale > 0 else x


class Crossing:
    """What happens to a tensor between two stages, and to its gradient on the way back.

    Each crossing draws its own numbers, where a codec rounds stochastically.
    """

    def __init__(self, variant: str) -> None:
        self.codec, self.grad_codec = VARIANTS[variant]
        self.seed = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.codec == "per tensor":
            return PerTensor.apply(x)
        self.seed += 1
        return through(x, self.codec, self.grad_codec, seed=self.seed, grad_seed=self.seed)


class Model(nn.Module):
    """All stages in one process; each boundary passes through the codec in both directions."""

    def __init__(self, variant: str, seed: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(GptStage(MODEL, k, NUM_STAGES, seed) for k in range(NUM_STAGES))
        self.boundary = Crossing(variant)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages[:-1]:
            x = self.boundary(stage(x))
        return self.stages[-1](x)


def learning_rate(step: int, num_steps: int) -> float:
    """A linear warm-up, then a cosine down to zero, so that the loss ends on a plateau."""
    warm = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    return LEARNING_RATE * warm * (1 + math.cos(math.pi * step / num_steps)) / 2


def train(job: Job) -> Outcome:
    torch.set_num_threads(1)
    corpus = load_corpus(None, MODEL.sequence_length)
    model = Model(job.variant, job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(job.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.num_steps)
        x, y = corpus.batch(step, BATCH_SIZE, MODEL.sequence_length, job.seed)
        loss = byte_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    points = [losses[i : i + POINT] for i in range(0, len(losses), POINT)]
    held_out = held_out_loss(model, corpus, job.num_held_out_batches)
    model.boundary = Crossing("raw")
    held_out_raw = held_out_loss(model, corpus, job.num_held_out_batches)
    return Outcome(job, [statistics.fmean(p) for p in points], held_out, held_out_raw)


@torch.no_grad()
def held_out_loss(model: Model, corpus: Corpus, num_batches: int) -> float:
    batches = (
        corpus.held_out_batch(i, BATCH_SIZE, MODEL.sequence_length) for i in range(num_batches)
    )
    return statistics.fmean(byte_loss(model(x), y).item() for x, y in batches)


def check_boundaries() -> None:
    """Every variant is near the identity in both directions, and only raw is the identity."""
    given = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))
    for variant in VARIANTS:
        x = given.clone().requires_grad_()
        y = Crossing(variant)(x)
        y.backward(given)
        assert x.grad is not None
        for got in (y.detach(), x.grad):
            error = ((got - given).norm() / given.norm()).item()
            assert error == 0 if variant == "raw" else 1e-4 < error < 0.15, (variant, error)


def row_of(variant: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Differences are taken seed by seed: a seed moves the loss more than a codec does."""
    own = {o.job.seed: o for o in outcomes if o.job.variant == variant}
    raw = {o.job.seed: o for o in outcomes if o.job.variant == "raw"}
    change = [100 * (own[seed].held_out / raw[seed].held_out - 1) for seed in own]
    weights = [100 * (own[seed].held_out_raw / raw[seed].held_out - 1) for seed in own]
    held_out = [o.held_out for o in own.values()]
    return {
        "case": variant,
        "num_seeds": len(own),
        "train loss": statistics.fmean(o.curve[-1] for o in own.values()),
        "held-out loss": statistics.fmean(held_out),
        "min": min(held_out),
        "max": max(held_out),
        "against raw, %": statistics.fmean(change),
        "min, %": min(change),
        "max, %": max(change),
        "weights alone, %": statistics.fmean(weights),
    }


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    for variant in VARIANTS:
        curves = [o.curve for o in outcomes if o.job.variant == variant]
        mean = [statistics.fmean(point) for point in zip(*curves, strict=True)]
        steps = [POINT * (i + 1) for i in range(len(mean))]
        for axis in axes:
            axis.plot(steps, mean, label=variant, linewidth=1)
    tail = len(mean) // 2
    ends = [o.curve[-1] for o in outcomes if "naive" not in o.job.variant]
    axes[1].set_xlim(POINT * tail, POINT * len(mean))
    axes[1].set_ylim(min(ends) - 0.02, min(ends) + 0.3)
    for axis, title in zip(axes, ("training loss", "its second half"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel("nats per byte")
    axes[1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each variant")
    parser.add_argument("--held-out", type=int, default=64, help="batches of held-out text")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, one core each")
    parser.add_argument("--plot", type=Path, help="where to draw the curves (PNG)")
    add_save_option(parser)
    options = parser.parse_args()
    check_boundaries()
    # Seed by seed, so that an early stop leaves whole comparisons.
    jobs = [
        Job(variant, seed, options.steps, options.held_out)
        for seed in range(options.seeds)
        for variant in VARIANTS
    ]
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for outcome in progress(pool.imap(train, jobs), len(jobs), "trainings"):
            outcomes.append(outcome)
    rows = [row_of(variant, outcomes) for variant in VARIANTS]
    title = f"activations / gradients, {NUM_STAGES} stages, {options.steps} steps"
    report("convergence", rows, title=title, save=options.json)
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    main()
