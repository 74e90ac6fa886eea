"""The replacement for deepspeed.runtime.pipe.p2p: its contract, and DeepSpeed itself where it is.

The contract is shown without DeepSpeed, on a grid like its own: that runs everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from pipecomm.drop_in import deepspeed as p2p
from pipecomm.drop_in.backend import BackendOptions
from pipecomm.errors import ConfigError, TensorError
from tests.drop_in.backend_ranks import Check, failures_of, names
from tests.ranks import spawn_ranks

_MIB = 1 << 18  # float32 values in a MiB
_NUM_STAGES = 2

Group = dist.ProcessGroup


@dataclass(frozen=True)
class _Grid:
    """Two pipelines of two stages, in DeepSpeed's order: ranks 0 and 2, ranks 1 and 3."""

    rank: int
    pipe_group: Group

    def get_stage_id(self) -> int:
        return self.rank // 2

    def stage_to_global(self, stage_id: int) -> int:
        return 2 * stage_id + self.rank % 2

    def get_pipe_parallel_group(self) -> Group:
        return self.pipe_group


def _start(rank: int, options: BackendOptions | None = None, overlap_sends: bool = False) -> int:
    """Install into a stand-in for DeepSpeed's module and connect as its engine does: my stage."""
    replaced = ModuleType("deepspeed.runtime.pipe.p2p")
    sys.modules[replaced.__name__] = replaced
    try:
        p2p.install(options, overlap_sends=overlap_sends)
    finally:
        del sys.modules[replaced.__name__]
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    grid = _Grid(rank, groups[rank % 2])
    assert replaced.can_send_recv()
    replaced.init_process_groups(grid)
    return grid.get_stage_id()


def install_replaces_what_the_engine_calls(rank: int, size: int, group: Group) -> None:
    replaced = ModuleType("deepspeed.runtime.pipe.p2p")
    sys.modules[replaced.__name__] = replaced
    p2p.install()
    del sys.modules[replaced.__name__]
    for name in ("send", "recv", "wait", "can_send_recv", "init_process_groups"):
        assert getattr(replaced, name) is getattr(p2p, name)


def first_exchange_of_the_engine_completes(rank: int, size: int, group: Group) -> None:
    stage, loss = _start(rank), torch.tensor(float(rank))
    if stage == 0:
        p2p.send(loss, 1)
    else:
        p2p.recv(loss, 0)
        assert loss.item() == rank - 2


def activations_and_gradients_of_two_pipelines_stay_apart(
    rank: int, size: int, group: Group
) -> None:
    stage = _start(rank)
    for index in range(20):
        x = torch.full((100,), 100.0 * rank + index)
        got = torch.zeros(100)
        if stage == 0:
            p2p.send(x, 1)
            p2p.recv(got, 1)
        else:
            p2p.recv(got, 0)
            p2p.send(x, 0)
        assert got.tolist() == [100.0 * ((rank + 2) % 4) + index] * 100


def sent_tensor_may_be_written_to_when_send_has_returned(
    rank: int, size: int, group: Group
) -> None:
    if _start(rank) == 0:
        x = torch.ones(16 * _MIB)
        p2p.send(x, 1)
        x.zero_()
    else:
        got = torch.zeros(16 * _MIB)
        p2p.recv(got, 0)
        assert bool((got == 1).all())


def overlapped_send_does_not_wait_for_the_receiver(rank: int, size: int, group: Group) -> None:
    stage = _start(rank, overlap_sends=True)
    sent, got = torch.full((16 * _MIB,), float(rank)), torch.zeros(16 * _MIB)
    p2p.send(sent, 1 - stage)
    del sent
    dist.barrier(group)
    p2p.recv(got, 1 - stage)
    p2p.wait()
    assert bool((got == (rank + 2) % 4).all())


def async_operations_end_at_wait(rank: int, size: int, group: Group) -> None:
    stage, got = _start(rank), torch.zeros(4)
    p2p.recv(got, 1 - stage, async_op=True)
    dist.barrier(group)
    p2p.send(torch.full((4,), float(rank)), 1 - stage, async_op=True)
    p2p.wait()
    assert got.tolist() == [float((rank + 2) % 4)] * 4


def options_hold_for_the_pipelines_messages(rank: int, size: int, group: Group) -> None:
    stage = _start(rank, BackendOptions(codec="int8", min_nbytes=0))
    torch.manual_seed(0)
    sent, got = torch.randn(4, 64), torch.zeros(4, 64)
    if stage == 0:
        p2p.send(sent, 1)
        p2p.recv(got, 1)
        assert torch.equal(got, sent)
    else:
        p2p.recv(got, 0)
        assert 0 < (got - sent).abs().max() < 0.1
        p2p.send(sent, 0)


def error_of_a_call_reaches_its_caller(rank: int, size: int, group: Group) -> None:
    stage = _start(rank)
    with pytest.raises(TensorError, match="contiguous"):
        p2p.recv(torch.zeros(4, 4).t(), 1 - stage)


CHECKS: tuple[Check, ...] = (
    install_replaces_what_the_engine_calls,
    first_exchange_of_the_engine_completes,
    activations_and_gradients_of_two_pipelines_stay_apart,
    sent_tensor_may_be_written_to_when_send_has_returned,
    overlapped_send_does_not_wait_for_the_receiver,
    async_operations_end_at_wait,
    options_hold_for_the_pipelines_messages,
    error_of_a_call_reaches_its_caller,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(4, CHECKS, world="gloo")


@pytest.mark.parametrize("name", names(CHECKS))
def test_four_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def test_send_before_the_grid_is_known_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="init_process_groups"):
        p2p.send(torch.ones(1), 1)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_install_without_deepspeed_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match="deepspeed"):
        p2p.install()


# DeepSpeed itself


def _layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4)]


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(16)]


def _reference() -> dict[str, torch.Tensor]:
    """The unsplit model's parameters after two steps of eight microbatches."""
    model = torch.nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 8):
        optimizer.zero_grad()
        for x, y in _batches()[start : start + 8]:
            (torch.nn.functional.mse_loss(model(x), y) / 8).backward()
        optimizer.step()
    return dict(model.named_parameters())


def _train(rank: int, size: int, store_path: str, backend: str) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    if backend == "gloo":
        p2p.install(overlap_sends=True)
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=size,
    )
    assert dist.get_backend() == backend
    model = PipelineModule(
        _layers(), _NUM_STAGES, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": 1000,
        },
    )
    batches = _mine(engine.grid.get_data_parallel_id())
    for _ in range(2):
        engine.train_batch(batches)
    expected = _reference()
    for name, got in model.named_parameters():
        assert torch.allclose(got, expected[name], rtol=1e-4, atol=1e-6), name
    dist.barrier()
    dist.destroy_process_group()


def _mine(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return iter(_batches()[replica::2])


@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="deepspeed is not installed; the tests above show what it relies on",
)
@pytest.mark.parametrize("backend", ["pipecomm", "gloo"])
def test_deepspeed_trains_as_the_unsplit_model(backend: str) -> None:
    env = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    spawn_ranks(4, _train, backend, timeout_s=120, env=env)
