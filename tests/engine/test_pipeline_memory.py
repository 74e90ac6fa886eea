"""What a pipeline holds during a step is bounded, and after a step it holds nothing."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.pipeline import Pipeline
from tests.engine.pipeline_cases import (
    TIMEOUT_S,
    WIDTH,
    batch,
    linear_stages,
    mse,
    reference_loss,
    relative_error,
    results_of,
    rows,
    run_cases,
)
from tests.ranks import spawn_ranks

SIZE = 2


def pipeline_of(stage: nn.Module, num_microbatches: int, **options: Any) -> Pipeline:
    return Pipeline(
        stage, loss_fn=mse, num_microbatches=num_microbatches, timeout_s=TIMEOUT_S, **options
    )


class Watch:
    """Weak references to what goes into and out of a module; the most alive at one time."""

    def __init__(self, module: nn.Module) -> None:
        self.inputs: list[weakref.ref[Tensor]] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.peak_outputs = 0
        module.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.inputs.append(weakref.ref(args[0]))
        self.outputs.append(weakref.ref(output))
        self.peak_outputs = max(self.peak_outputs, self.num_alive(self.outputs))

    @staticmethod
    def num_alive(references: list[weakref.ref[Tensor]]) -> int:
        return sum(reference() is not None for reference in references)


class SavedTensors:
    """Counts the tensors that autograd saves for backward; the most alive at one time."""

    class _Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[SavedTensors._Box] = weakref.WeakSet()
        self.peak = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def _pack(self, tensor: Tensor) -> _Box:
        box = self._Box(tensor)
        self._alive.add(box)
        self.peak = max(self.peak, len(self._alive))
        return box


def activations_by_number_of_microbatches(rank: int, size: int) -> dict[int, tuple[int, int]]:
    """(live outputs, saved tensors) at most."""
    found = {}
    for number in (4, 32):
        stage = linear_stages(size)[rank]
        watch, saved = Watch(stage), SavedTensors()
        with pipeline_of(stage, number) as pipeline, saved.hooks():
            pipeline.train_step(rows(2 * number), rows(2 * number))
        found[number] = (watch.peak_outputs, saved.peak)
    return found


def after_steps_without_collector(rank: int, size: int) -> dict[str, int]:
    """What is alive after steps of all kinds, with the garbage collector off."""
    stage = linear_stages(size)[rank]
    watch = Watch(stage)
    gc.collect()
    gc.disable()
    try:
        with pipeline_of(stage, 4) as pipeline:
            pipeline.train_step(rows(8), rows(8))
            pipeline.eval_step(rows(8), rows(8))
            pipeline.train_step(rows(8), rows(8), return_outputs=True)
            return {
                "inputs": watch.num_alive(watch.inputs[4:]) if rank else 0,
                "outputs": watch.num_alive(watch.outputs),
                "seen": len(watch.outputs),
            }
    finally:
        gc.enable()


def many_steps_of_changing_length(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """(after 60 steps, after 260 steps) of resident KiB, open files and Python tensors."""
    stage = linear_stages(size)[rank]
    counts = []
    with pipeline_of(stage, 4) as pipeline:
        for step in range(260):
            if step == 20:
                gc.collect()
                gc.disable()
            if step in (60, 259):
                tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
                counts.append((resident_kib(), len(os.listdir("/proc/self/fd")), tensors))
            given = batch(4, seed=step, shape=(16 + 37 * step % 241, WIDTH))
            if step % 50 == 0:
                pipeline.eval_step(given.inputs, given.targets)
            pipeline.train_step(given.inputs, given.targets)
            stage.zero_grad()
    gc.enable()
    return dict(zip(("kib", "files", "tensors"), zip(*counts, strict=True), strict=True))


def resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def evaluation_between_training(rank: int, size: int) -> dict[str, Any]:
    """Training as if evaluation, with other numbers of microbatches, had not happened."""
    stages = linear_stages(size)
    expected = copy.deepcopy(stages)
    errors, loss_errors = [], []
    with pipeline_of(stages[rank], 4) as pipeline:
        for step, number in enumerate((1, 3, None)):
            stages[rank].zero_grad()
            for stage in expected:
                stage.zero_grad()
            given, other = batch(8, seed=step), batch(8, seed=100 + step)
            pipeline.train_step(given.inputs, given.targets)
            reference_loss(expected, given, mse).backward()
            result = pipeline.eval_step(other.inputs, other.targets, num_microbatches=number)
            if result.loss is not None:
                loss = reference_loss(expected, other, mse).item()
                loss_errors.append(abs(result.loss - loss) / loss)
            pairs = zip(stages[rank].parameters(), expected[rank].parameters(), strict=True)
            errors += [relative_error(p.grad, e.grad) for p, e in pairs]
    return {"errors": errors, "loss errors": loss_errors}


def traffic_of_evaluation(rank: int, size: int) -> dict[str, Any]:
    with pipeline_of(linear_stages(size)[rank], 4) as pipeline:
        train = pipeline.train_step(rows(8), rows(8)).stats
        evaluation = pipeline.eval_step(rows(8), rows(8)).stats
    return {
        "train": (train.payload_nbytes_sent, train.payload_nbytes_received),
        "eval": (evaluation.payload_nbytes_sent, evaluation.payload_nbytes_received),
        "backward": [e.name for e in evaluation.events if e.args["direction"] == "backward"],
    }


def evaluation_without_loss(rank: int, size: int) -> dict[str, Any]:
    stages = linear_stages(size)
    with Pipeline(stages[rank], timeout_s=TIMEOUT_S) as pipeline:
        result = pipeline.eval_step(rows(8), num_microbatches=3, return_outputs=True)
    value = rows(8)
    for stage in stages:
        value = stage(value)
    right = result.outputs is not None and torch.allclose(torch.cat(result.outputs), value)
    return {"loss": result.loss, "outputs": None if result.outputs is None else right}


def hook_set_in_the_first_step(rank: int, size: int) -> list[int]:
    """How often it has fired after each of three steps."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.is_first_step = True
            self.fired = 0

        def fire(self, gradient: Tensor) -> None:
            self.fired += 1

        def forward(self, x: Tensor) -> Tensor:
            if self.is_first_step and x.requires_grad:
                x.register_hook(self.fire)
            return self.linear(x)

    stage = Hooked()
    fired = []
    with pipeline_of(stage, 4) as pipeline:
        for _ in range(3):
            pipeline.train_step(rows(8), rows(8))
            stage.is_first_step = False
            fired.append(stage.fired)
    return fired


def nothing_kept_after_an_error(rank: int, size: int) -> int:
    """Live boundary tensors after a step that failed on its third microbatch."""

    class Fails(nn.Module):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.calls = 0 if fails else -100

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("boom")
            return self.linear(x)

    stage = Fails(rank == 1)
    watch = Watch(stage)
    with pipeline_of(stage, 8, schedule="gpipe") as pipeline:
        with pytest.raises(ValueError, match="boom"):
            pipeline.train_step(rows(8), rows(8))
        # The error holds the frames it came through, and with them their tensors.
        return watch.num_alive(watch.outputs)


def statistics_of_a_step(rank: int, size: int) -> dict[str, Any]:
    stage = linear_stages(size)[rank]
    with pipeline_of(stage, 3) as pipeline:
        pipeline.train_step(rows(6), rows(6))
        stats = pipeline.train_step(rows(6), rows(6)).stats
    return {
        "stats": stats,
        "names": {
            lane: [event.name for event in stats.events if event.lane == lane]
            for lane in ("compute", "send", "recv")
        },
    }


CASES = {
    SIZE: (
        activations_by_number_of_microbatches,
        after_steps_without_collector,
        many_steps_of_changing_length,
        evaluation_between_training,
        traffic_of_evaluation,
        evaluation_without_loss,
        hook_set_in_the_first_step,
        nothing_kept_after_an_error,
        statistics_of_a_step,
    )
}


@pytest.fixture(scope="module")
def results() -> Callable[[Callable[..., Any]], list[Any]]:
    """results(case) -> the case's result on each rank."""
    by_rank = spawn_ranks(SIZE, run_cases, CASES[SIZE], timeout_s=120)

    def of(case: Callable[..., Any]) -> list[Any]:
        return results_of(by_rank, case)

    return of


def test_activations_do_not_grow_with_the_number_of_microbatches(results: Any) -> None:
    for found in results(activations_by_number_of_microbatches):
        outputs, saved = found[32]
        assert outputs <= SIZE + 1
        assert saved <= found[4][1]


def test_boundary_tensors_die_without_the_collector(results: Any) -> None:
    for found in results(after_steps_without_collector):
        assert found == {"inputs": 0, "outputs": 0, "seen": 12}


def test_many_steps_of_changing_length_leave_nothing_behind(results: Any) -> None:
    for found in results(many_steps_of_changing_length):
        before, after = found["kib"]
        assert after - before < 10 * 1024
        assert found["files"][0] == found["files"][1]
        # A message that has just left may or may not be counted; one a step would be 200.
        assert abs(found["tensors"][1] - found["tensors"][0]) < 10


def test_evaluation_leaves_training_as_it_was(results: Any) -> None:
    first, last = results(evaluation_between_training)
    assert max(first["errors"] + last["errors"]) < 1e-5
    assert first["loss errors"] == []
    assert len(last["loss errors"]) == 3
    assert max(last["loss errors"]) < 1e-5


def test_evaluation_sends_activations_only(results: Any) -> None:
    nbytes = 8 * WIDTH * 4
    first, last = results(traffic_of_evaluation)
    assert first == {"train": (nbytes, nbytes), "eval": (nbytes, 0), "backward": []}
    assert last == {"train": (nbytes, nbytes), "eval": (0, nbytes), "backward": []}


def test_evaluation_without_a_loss_gives_outputs(results: Any) -> None:
    assert results(evaluation_without_loss) == [
        {"loss": None, "outputs": None},
        {"loss": None, "outputs": True},
    ]


def test_hook_on_a_received_tensor_fires_in_its_own_step_only(results: Any) -> None:
    assert results(hook_set_in_the_first_step) == [[0, 0, 0], [4, 4, 4]]


def test_failed_step_keeps_no_outputs(results: Any) -> None:
    assert results(nothing_kept_after_an_error) == [0, 0]


def test_statistics_name_every_action_and_transfer(results: Any) -> None:
    first, last = (found["names"] for found in results(statistics_of_a_step))
    forward, backward = ([f"{d} {i}" for i in range(3)] for d in ("forward", "backward"))
    assert first == {
        "compute": ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        "send": [f"send {name}" for name in forward],
        "recv": [f"recv {name}" for name in backward],
    }
    assert last == {
        "compute": ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
        "send": [f"send {name}" for name in backward],
        "recv": [f"recv {name}" for name in forward],
    }


def test_statistics_add_up(results: Any) -> None:
    for found in results(statistics_of_a_step):
        stats = found["stats"]
        assert 0 < stats.compute_s + stats.wait_s <= stats.step_s
        assert 0 <= stats.exposed_comm_s <= stats.wait_s
        assert stats.bubble == pytest.approx(1 - stats.compute_s / stats.step_s)
        assert stats.payload_nbytes_sent == 6 * WIDTH * 4
        assert stats.wire_nbytes_sent >= stats.payload_nbytes_sent
        waits = [e.end_s - e.start_s for e in stats.events if e.lane == "wait"]
        assert stats.wait_s == pytest.approx(sum(waits))


def test_transfers_lie_within_the_time_of_both_ranks(results: Any) -> None:
    for found in results(statistics_of_a_step):
        transfers = [e for e in found["stats"].events if e.lane in ("send", "recv")]
        assert all(0 < e.start_s <= e.end_s for e in transfers)
        assert all(e.args["payload_nbytes"] == 2 * WIDTH * 4 for e in transfers)
