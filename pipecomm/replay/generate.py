"""Traces of one rank that trains a transformer in a pipeline, after what such training keeps.

A layer keeps 34 bytes for each token and hidden value (Korthikanti et al., arXiv:2205.05198, with
attention that stores no scores), in the tensors of `_SAVED`; lengths change with every microbatch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pipecomm.errors import ConfigError
from pipecomm.replay.trace import Trace, TraceBuilder
from pipecomm.schedule import Kind, build

__all__ = ["TRACES", "TrainingTrace", "generate"]

# Bytes for each token and hidden value: norm input, q, k, v, attention, mask, norm input, fc1,
# gelu, mask.
_SAVED = (2, 2, 2, 2, 2, 1, 2, 8, 8, 1, 4)
# Weights of a layer: qkv, projection, the two of the MLP; times hidden squared.
_WEIGHTS = (3, 1, 4, 4)


@dataclass(frozen=True)
class TrainingTrace:
    """One rank over `steps` steps. Lengths are multiples of 8, up to `max_length` tokens."""

    schedule: str = "1f1b"
    stages: int = 4
    ranks: int = 4
    microbatches: int = 16
    rank: int = 0
    layers: tuple[int, ...] = (4, 4, 4, 4)  # by stage
    hidden: int = 2048
    max_length: int = 4096
    recomputes: bool = False
    evaluates: bool = False
    steps: int = 12
    seed: int = 0

    def record(self) -> Trace:
        return _Recorder(self).run()


class _Recorder:
    def __init__(self, of: TrainingTrace) -> None:
        self.of = of
        self.random = random.Random(of.seed)
        self.builder = TraceBuilder(f"generated: {of}")
        self.num_blocks = 0
        # By stage and microbatch: tokens, and what each layer keeps.
        self.kept: dict[tuple[int, int], tuple[int, list[list[int]]]] = {}
        self.has_optimizer_state = False

    def run(self) -> Trace:
        schedule = build(
            self.of.schedule, self.of.stages, self.of.microbatches, num_ranks=self.of.ranks
        )
        actions = schedule.ranks[self.of.rank]
        self.stages = sorted({action.stage for action in actions})
        weights = [
            [self.take(2 * w * self.of.hidden**2) for w in _WEIGHTS] for _ in self.all_layers()
        ]
        for step in range(self.of.steps):
            gradients = [[self.take(2 * w * self.of.hidden**2) for w in _WEIGHTS] for _ in weights]
            lengths = [self.length() for _ in range(self.of.microbatches)]
            for action in actions:
                if action.kind is Kind.F:
                    self.forward(action.stage, action.microbatch, lengths[action.microbatch])
                else:
                    self.backward(action.stage, action.microbatch)
            self.update()
            self.give_all(gradients)
            if self.of.evaluates and step % 3 == 2:
                self.evaluate()
        return self.builder.build()

    def all_layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in range(self.of.layers[stage])]

    def length(self) -> int:
        return 8 * self.random.randint(self.of.max_length // 64, self.of.max_length // 8)

    def take(self, nbytes: int) -> int:
        self.num_blocks += 1
        self.builder.allocate(self.num_blocks, nbytes)
        return self.num_blocks

    def give_all(self, blocks: list[list[int]]) -> None:
        for some in reversed(blocks):
            for block in reversed(some):
                self.builder.free(block)

    def layer_forward(self, tokens: int) -> list[int]:
        unit = tokens * self.of.hidden
        saved = []
        for nbytes in _SAVED:
            scratch = self.take(unit * 2)
            saved.append(self.take(unit * nbytes))
            self.builder.free(scratch)
        return saved

    def forward(self, stage: int, microbatch: int, tokens: int) -> None:
        received = self.take(2 * tokens * self.of.hidden)
        kept = [[received]]
        for _ in range(self.of.layers[stage]):
            saved = self.layer_forward(tokens)
            if self.of.recomputes:
                kept.append([saved[0]])
                for block in reversed(saved[1:]):
                    self.builder.free(block)
            else:
                kept.append(saved)
        self.kept[stage, microbatch] = (tokens, kept)

    def backward(self, stage: int, microbatch: int) -> None:
        tokens, kept = self.kept.pop((stage, microbatch))
        gradient = self.take(2 * tokens * self.of.hidden)
        for saved in reversed(kept[1:]):
            if self.of.recomputes:
                self.builder.free(saved[0])
                saved = self.layer_forward(tokens)
            for block in reversed(saved):
                scratch = self.take(2 * tokens * self.of.hidden)
                self.builder.free(block)
                self.builder.free(scratch)
            next_gradient = self.take(2 * tokens * self.of.hidden)
            self.builder.free(gradient)
            gradient = next_gradient
        self.builder.free(gradient)
        self.builder.free(kept[0][0])

    def update(self) -> None:
        """Adam: two float32 states for each weight, made at the first step; float32 scratch."""
        for _ in self.all_layers():
            for weight in _WEIGHTS:
                nbytes = 4 * weight * self.of.hidden**2
                if not self.has_optimizer_state:
                    self.take(nbytes)
                    self.take(nbytes)
                self.builder.free(self.take(nbytes))
        self.has_optimizer_state = True

    def evaluate(self) -> None:
        """Forwards that keep nothing, of the greatest length in turn with short ones."""
        for i in range(4):
            tokens = self.of.max_length if i % 2 == 0 else self.length()
            before = self.take(2 * tokens * self.of.hidden)
            for _ in self.all_layers():
                saved = self.layer_forward(tokens)
                self.builder.free(before)
                before = saved.pop()
                self.give_all([saved])
            self.builder.free(before)


_UNEQUAL = (6, 4, 3, 3)
#: The traces that matter, by name.
TRACES: dict[str, TrainingTrace] = {
    "1f1b": TrainingTrace(),
    "1f1b-recompute": TrainingTrace(recomputes=True),
    "interleaved": TrainingTrace(schedule="interleaved", stages=8, layers=(2,) * 8),
    "interleaved-recompute": TrainingTrace(
        schedule="interleaved", stages=8, layers=(2,) * 8, recomputes=True
    ),
    "unequal-stages": TrainingTrace(layers=_UNEQUAL, rank=1),
    "evaluation": TrainingTrace(evaluates=True, rank=2),
}


def generate(name: str) -> Trace:
    """The trace of that name, the same each time. Raises ConfigError for another name."""
    if name not in TRACES:
        raise ConfigError(f"expected one of {', '.join(TRACES)} as trace; got {name!r}")
    make: Callable[[], Trace] = TRACES[name].record
    return make()
