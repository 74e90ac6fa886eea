"""What do gradients that come one update late change in training? A byte-level GPT, by rule."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _harness import add_save_option, progress, report
from torch import nn

import pipecomm
from pipecomm.app.data import load_corpus
from pipecomm.app.gpt import GptConfig, GptStage, byte_loss
from pipecomm.schedule import Schedule, build

MODEL = GptConfig(num_layers=2, width=128, num_heads=4, sequence_length=64)
BATCH_SIZE, MICROBATCHES = 16, 2
# Updates of one call of train_step; between two calls nothing is late.
UPDATES_PER_STEP = 25
NUM_WARMUP_UPDATES = 50


def sgd(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=rate, momentum=0.9)


def adamw(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


# With the rate with which the synchronous training of this size does best, of 0.05, 0.1, 0.2, 0.4
# and of 1e-3, 2e-3, 4e-3 (500 updates); and with a lower one, as late gradients ask for.
OPTIMIZERS = {
    "sgd 0.1": sgd(0.1),
    "sgd 0.02": sgd(0.02),
    "adamw 2e-3": adamw(2e-3),
    "adamw 5e-4": adamw(5e-4),
}
# The first is the one to compare with: every gradient is of the weights that it updates.
RULES = ("synchronous", "none", "dc", "nesterov", "feedback")


class Job(NamedTuple):
    optimizer: str
    rule: str
    seed: int
    num_updates: int
    num_held_out: int


def schedule_of(rule: str) -> Schedule:
    # With the newest weights, on one rank, nothing is late.
    name = "paci" if rule == RULES[0] else "pipedream-2bw"
    return build(name, 1, MICROBATCHES * UPDATES_PER_STEP, update_every=MICROBATCHES)


def train(job: Job) -> tuple[Job, float, float]:
    """Loss of the last updates, and on held-out text."""
    torch.set_num_threads(1)
    corpus = load_corpus(None, MODEL.sequence_length)
    model = GptStage(MODEL, 0, 1, job.seed)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    base_rate = optimizer.param_groups[0]["lr"]
    losses = []
    rule = "none" if job.rule == "synchronous" else job.rule
    pipeline = pipecomm.Pipeline(
        model,
        schedule=schedule_of(job.rule),
        loss_fn=byte_loss,
        updates=pipecomm.Updates(compensation=rule),
    )
    with pipeline:
        for step in range(job.num_updates // UPDATES_PER_STEP):
            done = step * UPDATES_PER_STEP
            for group in optimizer.param_groups:
                group["lr"] = base_rate * min(1.0, (done + 1) / NUM_WARMUP_UPDATES)
            rows = BATCH_SIZE * UPDATES_PER_STEP
            x, y = corpus.batch(step, rows, MODEL.sequence_length, job.seed)
            loss = pipeline.train_step(x, y, optimizer=optimizer).loss
            assert loss is not None
            losses.append(loss)
        held_out = [
            pipeline.eval_step(
                *corpus.held_out_batch(index, BATCH_SIZE, MODEL.sequence_length),
                num_microbatches=1,
            ).loss
            for index in range(job.num_held_out)
        ]
    return job, losses[-1], statistics.fmean(loss for loss in held_out if loss is not None)


def check_delay() -> None:
    """One batch late, as the plain rule W(t+1) = W(t) - lr g(W(t-1)) says, bit for bit."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 5).unbind(0), torch.randn(3, 4, 5).unbind(0)
    model = nn.Linear(5, 5)
    old = new = [p.detach().clone() for p in model.parameters()]
    for inputs, targets in zip(x, y, strict=True):
        weights = [p.clone().requires_grad_() for p in old]
        loss = nn.functional.mse_loss(nn.functional.linear(inputs, *weights), targets)
        gradients = torch.autograd.grad(loss, weights)
        old, new = new, [p - 0.1 * g for p, g in zip(new, gradients, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = build("pipedream-2bw", 1, 3, update_every=1)
    with pipecomm.Pipeline(model, schedule=order, loss_fn=nn.functional.mse_loss) as pipeline:
        pipeline.train_step(torch.cat(x), torch.cat(y), optimizer=optimizer)
    for got, expected in zip(model.parameters(), new, strict=True):
        torch.testing.assert_close(got.detach(), expected, rtol=1e-6, atol=1e-7)


def row_of(optimizer: str, rule: str, found: dict[Job, tuple[float, float]]) -> dict[str, Any]:
    own = {job.seed: losses for job, losses in found.items() if job[:2] == (optimizer, rule)}
    plain = {job.seed: losses for job, losses in found.items() if job[:2] == (optimizer, RULES[0])}
    changes = [100 * (own[seed][1] / plain[seed][1] - 1) for seed in own]
    return {
        "case": f"{optimizer}, {rule}",
        "num_seeds": len(own),
        "train loss": statistics.fmean(losses[0] for losses in own.values()),
        "held-out loss": statistics.fmean(losses[1] for losses in own.values()),
        "against synchronous, %": statistics.fmean(changes),
        "min, %": min(changes),
        "max, %": max(changes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each rule")
    parser.add_argument("--held-out", type=int, default=32, help="batches of held-out text")
    parser.add_argument("--rules", nargs="+", choices=RULES[1:], default=list(RULES[1:]))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, one core each")
    add_save_option(parser)
    options = parser.parse_args()
    check_delay()
    num_updates = max(1, options.steps // UPDATES_PER_STEP) * UPDATES_PER_STEP
    jobs = [
        Job(optimizer, rule, seed, num_updates, options.held_out)
        for seed in range(options.seeds)
        for optimizer in OPTIMIZERS
        for rule in (RULES[0], *options.rules)
    ]
    found = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for job, *losses in progress(pool.imap(train, jobs), len(jobs), "trainings"):
            found[job] = tuple(losses)
    rows = [
        row_of(optimizer, rule, found)
        for optimizer in OPTIMIZERS
        for rule in (RULES[0], *options.rules)
    ]
    title = f"Updates by gradients one update late (2BW), {num_updates} updates"
    report("late_gradients", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
