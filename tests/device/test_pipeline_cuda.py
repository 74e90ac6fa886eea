"""The engine with its stages on a GPU: two ranks on one, against the unsplit model.

PIPECOMM_CHECK_DEVICE=cpu rehearses it, with the host as the device (PIPECOMM_STAND_IN_DEVICE=1)
and streams that lag; what needs a GPU's clock or memory is left out there.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecomm import CodecPolicy, Pipeline
from pipecomm.errors import StageFailedError
from tests.ranks import spawn_ranks

DEVICE = os.environ.get("PIPECOMM_CHECK_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
_ENV = {} if IS_CUDA else {"PIPECOMM_STAND_IN_DEVICE": "1", "PIPECOMM_STAND_IN_LAG_US": "100"}
_WIDTH = 1024 if IS_CUDA else 64
_ROWS = 512 if IS_CUDA else 32
_MICROBATCHES = 8


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target.to(output.device))


def _place() -> torch.device:
    # Both ranks on one device, and never torch's current one by chance.
    return torch.device("cuda", torch.cuda.device_count() - 1) if IS_CUDA else torch.device("cpu")


def _start(rank: int, size: int, store_path: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size
    )


def _stages(size: int, layers: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)

    def stage() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(layers))
        return nn.Sequential(*blocks).to(_place())

    return [stage() for _ in range(size)]


def _rows(seed: int, num_rows: int = _ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, _WIDTH, generator=generator).to(_place())


def _pipeline(stage: nn.Module, **options: Any) -> Pipeline:
    chosen = {"num_microbatches": _MICROBATCHES, "loss_fn": _mse, "timeout_s": 60.0, **options}
    return Pipeline(stage, **chosen)


def _error(value: Tensor | None, expected: Tensor | None) -> float:
    assert value is not None
    assert expected is not None
    value, expected = value.cpu(), expected.cpu()
    return ((value - expected).abs().max() / expected.abs().max()).item()


def _worst_error(rank: int, stages: Sequence[nn.Module], pipeline: Pipeline, steps: int) -> float:
    """Of gradients and losses, with steps of SGD on both sides."""
    expected = copy.deepcopy(list(stages))
    worst = 0.0
    for step in range(steps):
        given, target = _rows(2 * step), _rows(2 * step + 1)
        for module in (stages[rank], *expected):
            module.zero_grad()
        result = pipeline.train_step(given, target)
        value = given
        for stage in expected:
            value = stage(value.to(next(stage.parameters()).device))
        loss = _mse(value, target)
        loss.backward()
        pairs = zip(stages[rank].parameters(), expected[rank].parameters(), strict=True)
        worst = max(worst, *(_error(p.grad, e.grad) for p, e in pairs))
        if result.loss is not None:
            worst = max(worst, abs(result.loss / loss.item() - 1))
        with torch.no_grad():
            for parameter in (p for m in (stages[rank], *expected) for p in m.parameters()):
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    return worst


def _equals_the_unsplit_model(rank: int, size: int, store_path: str) -> None:
    _start(rank, size, store_path)
    for schedule in ("gpipe", "1f1b", "eager-1f1b"):
        stages = _stages(size)
        with _pipeline(stages[rank], schedule=schedule) as pipeline:
            assert _worst_error(rank, stages, pipeline, steps=3) < 1e-4, schedule


def _codecs_stay_near(rank: int, size: int, store_path: str) -> None:
    _start(rank, size, store_path)
    coded = CodecPolicy("int8", min_nbytes=0)
    guarded = CodecPolicy("int4", min_nbytes=0, guard_every=1, guard_limit=0.001)
    for codec, low, high in ((coded, 1e-5, 0.1), (guarded, 0.0, 1e-4)):
        stages = _stages(size)
        with _pipeline(stages[rank], codec=codec, grad_codec="raw") as pipeline:
            assert low <= _worst_error(rank, stages, pipeline, steps=1) < high, codec
            assert pipeline.codecs.get("forward") in (None, "raw" if codec is guarded else "int8")
    with _pipeline(_stages(size)[rank], codec="auto", grad_codec="auto") as pipeline:
        assert set(pipeline.codecs.values()) <= {"raw", "int8"}


def _host_and_device_meet(rank: int, size: int, store_path: str) -> None:
    """A stage on the CPU before one on the device, and after."""
    _start(rank, size, store_path)
    for on_host in range(size):
        stages = _stages(size)
        stages[on_host].cpu()
        with _pipeline(_Moves(stages[rank])) as pipeline:
            moved = [_Moves(stage) for stage in stages]
            assert _worst_error(rank, moved, pipeline, steps=2) < 1e-4


class _Moves(nn.Module):
    """Its inputs to where it lies; the last one's output to where the targets do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(next(self.parameters()).device))  # type: ignore[no-any-return]


def _others_travel(rank: int, size: int, store_path: str) -> None:
    """Integers, an unused output, a scalar, nothing; from the CPU as well."""
    _start(rank, size, store_path)
    ids = torch.arange(_ROWS) + 2**40
    seen: list[tuple[Tensor, ...]] = []

    class Sends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(_WIDTH, _WIDTH, device=_place())

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            y = self.linear(x)
            return y, ids, self.linear(x), y.mean(), x[:0]

    class Takes(Sends):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            seen.append(others)
            return self.linear(x)  # type: ignore[no-any-return]

    stage = Sends() if rank == 0 else Takes()
    with _pipeline(stage) as pipeline:
        pipeline.train_step((_rows(0), ids), _rows(1))
    assert all(p.grad is not None for p in stage.parameters())
    if rank == 1:
        assert torch.equal(torch.cat([others[0] for others in seen]).cpu(), ids)
        assert all(tensor.device == _place() for others in seen for tensor in others)
        assert [tuple(tensor.shape) for tensor in seen[0][2:]] == [(), (0, _WIDTH)]


def _evaluates_and_clips(rank: int, size: int, store_path: str) -> None:
    _start(rank, size, store_path)
    stages = _stages(size)
    whole = copy.deepcopy(nn.Sequential(*stages))
    given, target = _rows(0), _rows(1)
    with _pipeline(stages[rank]) as pipeline:
        result = pipeline.eval_step(given, target, num_microbatches=3, return_outputs=True)
        if result.outputs is not None:
            assert _error(torch.cat(result.outputs), whole(given)) < 1e-4
        pipeline.train_step(given, target)
        _mse(whole(given), target).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01).item()
        assert abs(pipeline.clip_grad_norm_(0.01) / expected - 1) < 1e-4
    pairs = zip(stages[rank].parameters(), whole[rank].parameters(), strict=True)
    assert max(_error(p.grad, e.grad) for p, e in pairs) < 1e-3


def _error_ends_the_step(rank: int, size: int, store_path: str) -> None:
    _start(rank, size, store_path)
    stages = _stages(size)
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("boom")

    if rank == 1:
        stages[1].register_forward_pre_hook(fail)
    with _pipeline(stages[rank]) as pipeline:
        with pytest.raises(StageFailedError if rank == 0 else ValueError, match="boom"):
            pipeline.train_step(_rows(0), _rows(1))
        if rank == 1:
            calls = 3
        dist.barrier()
        assert _worst_error(rank, stages, pipeline, steps=2) < 1e-4


def _memory_stays_flat(rank: int, size: int, store_path: str) -> None:
    """Over steps of changing length, in which the host is far ahead of the device."""
    _start(rank, size, store_path)
    stage = _stages(size)[rank]

    def taken() -> int:
        if not IS_CUDA:
            return pipeline_pool.stats().reserved_nbytes
        torch.cuda.synchronize()
        dist.barrier()
        free, total = torch.cuda.mem_get_info(_place())
        return total - free

    from pipecomm.memory.pool import default_pool

    pipeline_pool = default_pool()
    with _pipeline(stage, num_microbatches=32) as pipeline:
        lengths = [_ROWS, 3 * _ROWS, 2 * _ROWS, 3 * _ROWS + 32]
        for turn in range(6):
            for length in lengths:
                stage.zero_grad()
                pipeline.train_step(_rows(0, length), _rows(1, length))
            if turn == 1:
                before = taken()
        assert taken() <= before + (8 << 20)


def _host_is_not_held_up(rank: int, size: int, store_path: str) -> None:
    """The first stage has enqueued its step long before the device has done it."""
    _start(rank, size, store_path)
    torch.manual_seed(0)
    layers = (nn.Linear(8192, 8192, device=_place()) for _ in range(6))
    given = torch.randn(4 * 4096, 8192, device=_place())
    with _pipeline(nn.Sequential(*layers), num_microbatches=4) as pipeline:
        for _ in range(2):
            pipeline.train_step(given, given)
            torch.cuda.synchronize()
            dist.barrier()
        start_s = time.perf_counter()
        pipeline.train_step(given, given)
        enqueued_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        done_s = time.perf_counter() - start_s
    assert rank == 1 or enqueued_s < 0.8 * done_s, (enqueued_s, done_s)


CHECKS: list[Callable[[int, int, str], None]] = [
    _equals_the_unsplit_model,
    _codecs_stay_near,
    _host_and_device_meet,
    _others_travel,
    _evaluates_and_clips,
    _error_ends_the_step,
    _memory_stays_flat,
    *([_host_is_not_held_up] if IS_CUDA else []),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_two_ranks(check: Callable[..., None]) -> None:
    spawn_ranks(2, check, env=_ENV, timeout_s=90)
