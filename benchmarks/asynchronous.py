"""How fast are updates without a flush, and what do they keep, beside gpipe and 1f1b?

Speed: stages that sleep (see schedules.py), 4 of them, batches of 8 microbatches; a call of
train_step is `--batches` batches, which is how many lie between two flushes of 2BW. Memory: the
most microbatches and versions that a stage of such a run kept, in bytes of the demo's model: its
weights in all versions, their gradients, AdamW's two moments, and what autograd saves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _harness import Timing, add_options, report
from _ranks import rows_of_ranks
from _sleeping import Live, data, measure_together, stages_of, use_fine_timers
from torch import Tensor, nn

import pipecomm
from pipecomm.app.gpt import GptConfig, GptStage
from pipecomm.schedule import Schedule, build

NUM_RANKS, BATCH = 4, 8
NAMES = ("gpipe", "1f1b", "pipedream-2bw")
# The demo's, with a layer for each stage; a microbatch of it has two rows.
MODEL, ROWS = GptConfig(NUM_RANKS, 128, 4, 128), 2


class Kept(NamedTuple):
    """The most on one rank."""

    activations: int
    versions: int


class Case:
    """The batches of one call, under one schedule, on one rank."""

    def __init__(self, name: str, rank: int, num_batches: int) -> None:
        self.live = Live()
        self.versions = 1
        is_asynchronous = name == "pipedream-2bw"
        # A synchronous schedule ends with its batch.
        count = BATCH * num_batches if is_asynchronous else BATCH
        options = {"update_every": BATCH} if is_asynchronous else {}
        schedule = build(name, NUM_RANKS, count, **options)
        self._pipeline, self._optimizer = self._connect(schedule, rank)
        self._inputs, self._targets = data(count)
        self._num_calls = 1 if is_asynchronous else num_batches

    def _connect(
        self, schedule: Schedule, rank: int
    ) -> tuple[pipecomm.Pipeline, torch.optim.Optimizer]:
        stages = stages_of(schedule, rank, self.live)
        pipeline = pipecomm.Pipeline(
            list(stages), schedule=schedule, loss_fn=nn.functional.mse_loss
        )
        return pipeline, torch.optim.SGD(nn.ModuleList(stages).parameters(), lr=1e-6)

    def run(self) -> float | None:
        """All batches; gives the last loss."""
        loss = None
        for _ in range(self._num_calls):
            late = self._pipeline.is_asynchronous
            given = {"optimizer": self._optimizer} if late else {}
            result = self._pipeline.train_step(self._inputs, self._targets, **given)
            if not late:
                self._optimizer.step()
                self._optimizer.zero_grad()
            self.versions = max(self.versions, result.stats.weight_versions)
            loss = result.loss
        return loss

    def kept(self) -> list[Kept]:
        """Of every rank."""
        found: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(found, Kept(self.live.peak, self.versions))
        return found

    def close(self) -> None:
        self._pipeline.close()


def model_nbytes(stage: int) -> tuple[int, int]:
    """Of the weights of one stage, and of what autograd saves of a microbatch."""
    module = GptStage(MODEL, stage, NUM_RANKS, seed=0)
    x = torch.zeros(ROWS, MODEL.sequence_length, dtype=torch.int64)
    if stage > 0:
        x = torch.randn(*x.shape, MODEL.width, requires_grad=True)
    weights = {p.untyped_storage().data_ptr(): p.nbytes for p in module.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(x)
    del output
    activations = sum(nbytes for pointer, nbytes in saved.items() if pointer not in weights)
    return sum(weights.values()), activations


def memory_nbytes(kept: list[Kept]) -> int:
    """Of the rank that needs the most."""
    needed = []
    for stage, (activations, versions) in enumerate(kept):
        weights, saved = model_nbytes(stage)
        # Versions, gradients, two moments.
        needed.append((versions + 3) * weights + activations * saved)
    return max(needed)


def row_of(name: str, timing: Timing, kept: list[Kept], num_batches: int) -> dict[str, Any]:
    return {
        "case": name,
        "batch_ms": timing.median_s / num_batches * 1e3,
        "p90_ms": timing.p90_s / num_batches * 1e3,
        "activations": " ".join(str(one.activations) for one in kept),
        "versions": " ".join(str(one.versions) for one in kept),
        "memory_mb": memory_nbytes(kept) / 1e6,
    }


def check_losses(losses: list[float | None]) -> None:
    """The schedules with one update a batch are equal; late gradients go the same way."""
    gpipe, one_f_one_b, late = (0.0 if loss is None else loss for loss in losses)
    assert abs(gpipe - one_f_one_b) <= 1e-5 * gpipe, losses
    assert abs(gpipe - late) <= 1e-2 * gpipe, losses


def run(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    use_fine_timers()
    cases = {name: Case(name, rank, options.batches) for name in NAMES}
    calls: dict[str, Callable[[], object]] = {name: case.run for name, case in cases.items()}
    check_losses([case.run() for case in cases.values()])
    timings = measure_together(calls, options.rounds)
    rows = [row_of(name, timings[name], cases[name].kept(), options.batches) for name in NAMES]
    for row in rows:
        row["faster_than_gpipe"] = f"{1 - row['batch_ms'] / rows[0]['batch_ms']:.1%}"
        row["less_than_gpipe"] = f"{1 - row['memory_mb'] / rows[0]['memory_mb']:.1%}"
    for case in cases.values():
        case.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=8, help="of a call of train_step")
    add_options(parser)
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    rows = rows_of_ranks(NUM_RANKS, run, options)
    title = f"{NUM_RANKS} ranks, batches of {BATCH} microbatches, {options.batches} a call"
    report("asynchronous", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
