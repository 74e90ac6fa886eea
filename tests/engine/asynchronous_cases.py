"""Cases of asynchronous pipelines, as functions of (rank, size) (pipeline_cases.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecomm.engine.pipeline import Pipeline
from pipecomm.engine.updates import Updates
from pipecomm.schedule import Schedule, build, version_use
from tests.engine import asynchronous_rules as rules
from tests.engine.pipeline_cases import TIMEOUT_S, WIDTH, linear_stages, mse, rows
from tests.engine.pipeline_error_cases import Outcome, outcome_of
from tests.engine.split_pipeline_cases import Counted

# A power of two, and so are its parts: a microbatch's share of a batch is exact.
NUM_MICROBATCHES = 16
EVERY = 4
STRENGTH = 0.5
sgd = functools.partial(torch.optim.SGD, lr=0.3)
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=0.02)


def normalised(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        for _ in range(num_stages)
    ]


def data() -> list[tuple[Tensor, Tensor]]:
    return [(rows(3, seed=i), rows(3, seed=i + 50)) for i in range(NUM_MICROBATCHES)]


def dc() -> rules.Change:
    def change(found: list[Tensor], new: Any, old: Any, stage: int, version: int) -> list[Tensor]:
        pairs = zip(found, new, old, strict=True)
        return [torch.add(g, g * g * (n - o), alpha=STRENGTH) for g, n, o in pairs]

    return change


def nesterov() -> rules.Change:
    momenta: dict[int, list[Tensor]] = {}

    def change(found: list[Tensor], new: Any, old: Any, stage: int, version: int) -> list[Tensor]:
        last = momenta.get(stage, [torch.zeros_like(g) for g in found])
        momenta[stage] = [m * STRENGTH + g for m, g in zip(last, found, strict=True)]
        pairs = zip(found, momenta[stage], strict=True)
        return [torch.add(g, m, alpha=STRENGTH) for g, m in pairs]

    return change


def feedback() -> rules.Change:
    applied: dict[int, list[list[Tensor]]] = {}

    def change(found: list[Tensor], new: Any, old: Any, stage: int, version: int) -> list[Tensor]:
        used = applied.setdefault(stage, [])
        if version < len(used):
            pairs = zip(found, used[version], strict=True)
            found = [torch.add(g, g - u, alpha=STRENGTH) for g, u in pairs]
        used.append(found)
        return found

    return change


CHANGES = {"dc": dc, "nesterov": nesterov, "feedback": feedback}


def trained(
    rank: int, stages: Sequence[nn.Module], schedule: Schedule, make: Any, updates: Any = None
) -> tuple[Any, Any]:
    """This rank's stage after a step, and the result of the step."""
    stage = stages[rank]
    inputs, targets = map(list, zip(*data(), strict=True))
    with Pipeline(stage, schedule=schedule, loss_fn=mse, updates=updates,
                  timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip
        result = pipeline.train_step(inputs, targets, optimizer=make(stage.parameters()))
    assert all(p.grad is None for p in stage.parameters())
    return stage, result


def same(stage: nn.Module, expected: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(p, expected[name]) for name, p in stage.named_parameters())


def plans(size: int) -> dict[str, Schedule]:
    return {
        "pipedream": build("pipedream", size, NUM_MICROBATCHES),
        "pipedream-2bw": build("pipedream-2bw", size, NUM_MICROBATCHES, update_every=EVERY),
        "paci": build("paci", size, NUM_MICROBATCHES, update_every=EVERY),
    }


def rule_of(name: str, stages: Any, make: Any, change: Any = None) -> list[rules.Values]:
    if name == "pipedream":
        return rules.pipedream(stages, data(), make, change)
    if name == "pipedream-2bw":
        return rules.two_versions(stages, data(), make, EVERY, change)
    return rules.newest(stages, data(), make, EVERY)


def follows(rank: int, size: int) -> dict[str, bool]:
    """By schedule, optimizer and model, whether the weights are those of the rule."""
    found = {}
    for name, schedule in plans(size).items():
        for optimizer, make in (("sgd", sgd), ("momentum", momentum), ("adamw", adamw)):
            expected = rule_of(name, linear_stages(size), make)
            stage, _ = trained(rank, linear_stages(size), schedule, make)
            found[f"{name}, {optimizer}"] = same(stage, expected[rank])
    return found


def compensated(rank: int, size: int) -> dict[str, bool]:
    found = {}
    schedules = plans(size)
    for name in ("pipedream", "pipedream-2bw"):
        for rule, change in CHANGES.items():
            expected = rule_of(name, linear_stages(size), sgd, change())
            updates = Updates(f"{rule}:{STRENGTH}")
            stage, _ = trained(rank, linear_stages(size), schedules[name], sgd, updates)
            found[f"{name}, {rule}"] = same(stage, expected[rank])
    return found


def with_buffers(rank: int, size: int) -> dict[str, bool]:
    """Statistics go on from microbatch to microbatch, whatever version the weights have."""
    trainer = rules.Trainer(normalised(size), sgd)
    for i, (x, target) in enumerate(data()):
        versions = [max(0, i - (size - 1 - k)) for k in range(size)]
        trainer.update(trainer.gradients(versions, x, target), versions)
    stage, _ = trained(rank, normalised(size), plans(size)["pipedream"], sgd)
    buffers = dict(trainer.stages[rank].named_buffers())
    return {
        "weights": same(stage, trainer.history[rank][-1]),
        "buffers": all(torch.equal(b, buffers[name]) for name, b in stage.named_buffers()),
    }


def rules_differ(rank: int, size: int) -> bool:
    """Whether every rule gives other weights than training without delay."""
    plain = linear_stages(size)
    whole = nn.Sequential(*plain)
    optimizer = sgd(whole.parameters())
    for x, target in data():
        optimizer.zero_grad()
        mse(whole(x), target).backward()
        optimizer.step()
    return (
        not any(
            same(plain[rank], rule_of(name, linear_stages(size), sgd)[rank]) for name in plans(size)
        )
        or rank == size - 1
    )


def results(rank: int, size: int) -> dict[str, Any]:
    """By schedule: versions kept, versions said, the loss and what it is to be."""
    found = {}
    for name, schedule in plans(size).items():
        _, result = trained(rank, linear_stages(size), schedule, functools.partial(sgd, lr=0.0))
        model = nn.Sequential(*linear_stages(size))
        with torch.no_grad():
            losses = [mse(model(x), target).item() for x, target in data()]
        expected = sum(losses) / len(losses) if rank == size - 1 else None
        said = version_use(schedule)[rank].live
        found[name] = (result.stats.weight_versions, said, result.loss, expected)
        names = [event.name for event in result.stats.events if event.lane == "compute"]
        assert names == [str(action) for action in schedule.ranks[rank]]
    return found


def two_steps_then_evaluation(rank: int, size: int) -> dict[str, Any]:
    """A step ends drained, so that the next one begins without delay, with the newest weights."""
    stage = linear_stages(size)[rank]
    expected = linear_stages(size)
    inputs, targets = map(list, zip(*data(), strict=True))
    optimizer = sgd(stage.parameters())
    with Pipeline(stage, schedule=plans(size)["pipedream"], loss_fn=mse,
                  timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip
        for _ in range(2):
            pipeline.train_step(inputs, targets, optimizer=optimizer)
            for one, values in zip(expected, rules.pipedream(expected, data(), sgd), strict=True):
                one.load_state_dict(values)
        x, target = data()[0]
        loss = pipeline.eval_step(x, target, num_microbatches=1).loss
    with torch.no_grad():
        wanted = mse(nn.Sequential(*expected)(x), target).item() if rank == size - 1 else None
    return {"weights": same(stage, dict(expected[rank].named_parameters())),
            "evaluation": loss == wanted}  # fmt: skip


def clipped_and_scaled(rank: int, size: int) -> float:
    """A scaled loss and clipping by stage against the plain rule; the largest difference."""

    def change(found: list[Tensor], new: Any, old: Any, stage: int, version: int) -> list[Tensor]:
        norm = torch.stack([g.norm() for g in found]).norm()
        return [g * torch.clamp(0.01 / (norm + 1e-6), max=1.0) for g in found]

    expected = rule_of("pipedream", linear_stages(size), sgd, change)[rank]
    updates = Updates(max_norm=0.01, loss_scale=1024.0)
    stage, _ = trained(rank, linear_stages(size), plans(size)["pipedream"], sgd, updates)
    before = dict(linear_stages(size)[rank].named_parameters())
    moved = max((p - before[n]).abs().max().item() for n, p in stage.named_parameters())
    error = max((p - expected[n]).abs().max().item() for n, p in stage.named_parameters())
    return error / moved


def live_activations(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """As in split_pipeline_cases."""
    found = {}
    for name, schedule in plans(size).items():
        stage = Counted()
        trained(0, [stage], schedule, sgd)
        found[name] = (stage.peak, schedule.peak_activations()[rank], stage.live)
    return found


class Explodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 7:
            raise ValueError("boom")
        y: Tensor = self.layer(x)
        return y


def error_in_the_midst(rank: int, size: int) -> dict[str, Any]:
    """The weights that are left are the newest, one memory each; the next step works."""
    stages: list[nn.Module] = linear_stages(size)
    stages[-1] = Explodes()
    stage = stages[rank]
    inputs, targets = map(list, zip(*data(), strict=True))
    optimizer = sgd(stage.parameters())
    with Pipeline(stage, schedule=plans(size)["pipedream"], loss_fn=mse,
                  timeout_s=TIMEOUT_S) as pipeline:  # fmt: skip

        def step() -> None:
            pipeline.train_step(inputs, targets, optimizer=optimizer)

        failed = outcome_of(step)
        versions = pipeline._updates[rank].versions
        is_clean = not versions._kept
        step()
    return {"failed": failed, "is_clean": is_clean}


def refused(rank: int, size: int) -> dict[str, Outcome]:
    """What each rank hears of a missing optimizer, an idle one, and settings that differ."""
    asynchronous, given = plans(size)["pipedream"], (rows(2 * NUM_MICROBATCHES),) * 2

    def step(schedule: Any, optimizer: Any) -> Callable[[], None]:
        def run() -> None:
            stage = linear_stages(size)[rank]
            with Pipeline(stage, schedule=schedule, loss_fn=mse, timeout_s=TIMEOUT_S) as pipeline:
                used = None if optimizer is None else optimizer(stage)
                pipeline.train_step(*given, optimizer=used)

        return run

    def differ() -> None:
        Pipeline(linear_stages(size)[rank], schedule=asynchronous, loss_fn=mse,
                 updates=Updates(max_norm=1.0 + rank), timeout_s=TIMEOUT_S)  # fmt: skip

    others = nn.Linear(1, 1)
    return {
        "none": outcome_of(step(asynchronous, None)),
        "synchronous": outcome_of(step("1f1b", lambda stage: sgd(stage.parameters()))),
        "others": outcome_of(step(asynchronous, lambda stage: sgd(others.parameters()))),
        "differ": outcome_of(differ),
    }


CASES = {
    2: (
        follows,
        compensated,
        with_buffers,
        rules_differ,
        results,
        two_steps_then_evaluation,
        clipped_and_scaled,
        live_activations,
        error_in_the_midst,
        refused,
    ),
    4: (follows, compensated, with_buffers, rules_differ, results, live_activations),
}
