"""What error does each codec make for its bits, on activations and gradients of a trained model?"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _harness import add_save_option, report
from convergence import (
    BATCH_SIZE,
    MODEL,
    NUM_STAGES,
    Job,
    Model,
    learning_rate,
    quantize_per_tensor,
)
from torch import Tensor

from pipecomm import Codec
from pipecomm.app.data import load_corpus
from pipecomm.app.gpt import byte_loss

# The boundary in the middle.
BOUNDARY = NUM_STAGES // 2 - 1
# Large models have a few channels and a few tokens far above the others; a small one has not.
OUTLIER_CHANNELS = (3, 17, 18, 40, 64, 65, 99, 120)
OUTLIER_FACTORS = (20.0, 60.0)
MASSIVE_TOKENS = 2
# Two channels of 768, far from each other and all others.
LONE_CHANNELS = (5, 300)
LONE_FACTOR = 100.0
CODECS = (
    "int8:group=32",
    "int8",
    "int8:group=128",
    "int8:hadamard=64",
    "int8:spikes=1",
    "int8:spikes=4",
    "fp8",
    "int4",
    "int4:hadamard=64",
    "int4:hadamard=64,rounding=stochastic",
    "int4:spikes=1",
    "int4-symmetric",
    "int4-symmetric:hadamard=64",
    "int4-symmetric:spikes=1",
    "int4-symmetric:spikes=2",
    "int4-symmetric:spikes=4",
    "nf4",
    "nf4:hadamard=64",
    "nf4:spikes=1",
    "nf4:spikes=2",
    "nf4:spikes=4",
)


class Recorded(torch.autograd.Function):
    """The identity, which keeps what passes in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
        ctx.kept = kept
        kept["activations"] = x.detach().clone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.kept["gradients"] = gradient.clone()
        return gradient, None


class Recorder:
    """Stands for the crossings of one step; records one of them."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        index = self.count % (NUM_STAGES - 1)
        self.count += 1
        return Recorded.apply(x, self.kept) if index == BOUNDARY else x


def recorded(job: Job) -> dict[str, Tensor]:
    """Activations and gradients [rows, length, width] of the last step of a raw training."""
    torch.set_num_threads(1)
    corpus = load_corpus(None, MODEL.sequence_length)
    model = Model("raw", job.seed)
    model.boundary = recorder = Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(job.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.num_steps)
        x, y = corpus.batch(step, BATCH_SIZE, MODEL.sequence_length, job.seed)
        byte_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorder.kept


def with_outliers(x: Tensor) -> Tensor:
    """Channels 20 to 60 times larger, and two tokens that are so in those channels once more."""
    result = x.clone()
    factors = torch.linspace(*OUTLIER_FACTORS, len(OUTLIER_CHANNELS))
    for channel, factor in zip(OUTLIER_CHANNELS, factors, strict=True):
        result[..., channel] *= factor
        result[0, :MASSIVE_TOKENS, channel] *= 10
    return result


def through(codec: str, x: Tensor) -> Tensor:
    if codec == "per tensor":
        return quantize_per_tensor(x)
    chosen = Codec(codec)
    return chosen.decode(chosen.encode(x, seed=1), torch.empty_like(x))


def relative(got: Tensor, x: Tensor) -> float:
    return float((got - x).norm() / x.norm())


def with_lone_channels() -> Tensor:
    x = torch.randn(64, 768, generator=torch.Generator().manual_seed(0))
    x[:, LONE_CHANNELS] *= LONE_FACTOR
    return x


def of_other_channels(got: Tensor, x: Tensor, larger: tuple[int, ...]) -> float:
    """Of all channels that were not made larger: what becomes of the ordinary ones."""
    others = [c for c in range(x.shape[-1]) if c not in larger]
    return relative(got[..., others], x[..., others])


def bits_per_value(codec: str, x: Tensor) -> float:
    if codec == "per tensor":
        return 8.0
    return 8 * Codec(codec).wire_nbytes(x.shape, x.dtype) / x.numel()


def row_of(codec: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    outliers = tensors["outliers"]
    arrived = through(codec, outliers)
    lone = with_lone_channels()
    return {
        "case": codec,
        "bits": bits_per_value(codec, outliers),
        "normal": relative(through(codec, tensors["normal"]), tensors["normal"]),
        "activations": relative(through(codec, tensors["activations"]), tensors["activations"]),
        "outliers": relative(arrived, outliers),
        "outliers, others": of_other_channels(arrived, outliers, OUTLIER_CHANNELS),
        "lone, others": of_other_channels(through(codec, lone), lone, LONE_CHANNELS),
        "gradients": relative(through(codec, tensors["gradients"]), tensors["gradients"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of the training that is recorded")
    add_save_option(parser)
    options = parser.parse_args()
    tensors = recorded(Job("raw", 0, options.steps, 0))
    generator = torch.Generator().manual_seed(0)
    tensors["normal"] = torch.randn(tensors["activations"].shape, generator=generator)
    tensors["outliers"] = with_outliers(tensors["activations"])
    for codec in CODECS:
        assert through(codec, tensors["normal"]).isfinite().all(), codec
    rows = [row_of(codec, tensors) for codec in (*CODECS, "per tensor")]
    report("codec_error", rows, title="relative L2 error", save=options.json)


if __name__ == "__main__":
    main()
