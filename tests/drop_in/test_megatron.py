"""The Megatron-style communicator: driven as Megatron's schedules drive theirs, in a gloo world."""

from __future__ import annotations

import os
import threading
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomm.drop_in.backend import BackendOptions
from pipecomm.drop_in.megatron import P2PCommunicator
from pipecomm.errors import ConfigError, TensorError
from tests.drop_in.backend_ranks import GROUP_TIMEOUT_S, Check, failures_of, names

_WIDTH = 8
_NUM_MICROBATCHES = 6
_MIB = 1 << 18  # float32 values in a MiB

Group = dist.ProcessGroup


def _config(**changed: Any) -> SimpleNamespace:
    config = {
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": False,
        "virtual_pipeline_model_parallel_size": None,
        "timers": None,
    }
    return SimpleNamespace(**{**config, **changed})


def _layer(stage: int) -> torch.nn.Linear:
    torch.manual_seed(stage)
    return torch.nn.Linear(_WIDTH, _WIDTH)


def _batches(lengths_vary: bool) -> list[torch.Tensor]:
    torch.manual_seed(100)
    return [torch.randn(3 + lengths_vary * (i % 3), _WIDTH) for i in range(_NUM_MICROBATCHES)]


def _communicator(
    group: Group, options: BackendOptions | None = None, **changed: Any
) -> P2PCommunicator:
    options = options or BackendOptions(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    return P2PCommunicator(group, _config(**changed), options=options)


class _Stage:
    """One stage of a pipeline as Megatron's schedules see it."""

    def __init__(self, communicator: P2PCommunicator, batches: list[torch.Tensor]) -> None:
        self.communicator = communicator
        self.layer = _layer(communicator.current_stage)
        self.batches = iter(batches)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, received: torch.Tensor | None) -> torch.Tensor:
        x = next(self.batches) if received is None else received
        y = torch.tanh(self.layer(x))
        self.kept.append((x, y.square().mean() if self.communicator.is_pp_last_stage else y))
        return y

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, y = self.kept.pop(0)
        torch.autograd.backward(y, gradient)
        return x.grad


def _one_f_one_b(communicator: P2PCommunicator, batches: list[torch.Tensor]) -> torch.nn.Linear:
    """One step in the order of Megatron's 1F1B; gives the stage's layer with its gradients."""
    shape, stage = (3, _WIDTH), _Stage(communicator, batches)
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    num_warmup = communicator.total_stages - communicator.current_stage - 1
    for _ in range(num_warmup):
        communicator.send_forward(stage.forward(communicator.recv_forward(shape, first)), last)
    num_steady = _NUM_MICROBATCHES - num_warmup
    received = communicator.recv_forward(shape, first)
    for index in range(num_steady):
        output = stage.forward(received)
        gradient = communicator.send_forward_recv_backward(output, shape, last)
        input_gradient = stage.backward(gradient)
        if index == num_steady - 1:
            communicator.send_backward(input_gradient, first)
        else:
            received = communicator.send_backward_recv_forward(input_gradient, shape, first)
    for _ in range(num_warmup):
        gradient = communicator.recv_backward(shape, last)
        communicator.send_backward(stage.backward(gradient), first)
    return stage.layer


def _check_step(group: Group, lengths_vary: bool) -> None:
    batches = _batches(lengths_vary)
    communicator = _communicator(group, variable_seq_lengths=lengths_vary)
    layer = _one_f_one_b(communicator, batches)
    layers = [_layer(stage) for stage in range(group.size())]
    for x in batches:
        for one in layers:
            x = torch.tanh(one(x))
        x.square().mean().backward()
    expected = layers[group.rank()]
    for got, want in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-5, atol=1e-7)


def one_f_one_b_gives_the_gradients_of_the_unsplit_model(
    rank: int, size: int, group: Group
) -> None:
    _check_step(group, lengths_vary=False)


def tensors_may_change_their_shape_at_every_microbatch(rank: int, size: int, group: Group) -> None:
    _check_step(group, lengths_vary=True)


def group_of_another_backend_is_taken_too(rank: int, size: int, group: Group) -> None:
    assert dist.get_backend(dist.group.WORLD) == "gloo"
    _check_step(dist.group.WORLD, lengths_vary=False)


def ranks_are_connected_once_for_all_steps(rank: int, size: int, group: Group) -> None:
    _communicator(group)
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    _one_f_one_b(_communicator(group), _batches(False))
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == before


def neighbours_and_ends_are_named_as_in_megatron(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group, virtual_pipeline_model_parallel_size=2)
    assert (communicator.prev_rank, communicator.next_rank) == (
        (rank - 1) % size,
        (rank + 1) % size,
    )
    assert communicator.is_pp_first_stage == (rank == 0)
    assert communicator.is_pp_last_stage == (rank == size - 1)
    assert (communicator.current_stage, communicator.total_stages) == (rank, size)
    assert communicator.virtual_pipeline_model_parallel_size == 2
    assert communicator.pp_group is group


def ends_neither_send_nor_receive(rank: int, size: int, group: Group) -> None:
    communicator, lost = _communicator(group), torch.ones(2)
    assert communicator.recv_forward((2,), True) is None
    assert communicator.recv_backward([(2,), (3,)], True) == [None, None]
    communicator.send_forward(lost, True)
    communicator.send_backward(None, True)
    assert communicator.send_forward_recv_backward(lost, [(2,)], True) is None
    assert communicator.send_backward_recv_forward([None], (2,), True) == [None]
    _check_step(group, lengths_vary=False)  # Nothing of that is on its way.


def lists_of_tensors_arrive_as_lists(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group)
    shapes = [torch.Size([2, 3]), [4]]
    tensors = [torch.full((2, 3), float(rank)), torch.arange(4.0)]
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    communicator.send_forward(tensors, last)
    for got, sent in zip(communicator.recv_forward(shapes, first), tensors, strict=True):
        assert first or (got.shape == sent.shape and got.requires_grad and got.is_leaf)
    gradients = communicator.send_backward_recv_forward(tensors, shapes, first)
    assert isinstance(gradients, list)
    back = communicator.send_forward_recv_backward(tensors, shapes, last)
    assert last or back[0].tolist() == [[rank + 1.0] * 3] * 2


def _ring_of_two(rank: int) -> P2PCommunicator | None:
    """Between ranks 0 and 1, where the next rank is the previous one too."""
    pair = dist.new_group([0, 1], backend="gloo")
    return _communicator(pair) if rank < 2 else None


def activations_and_gradients_between_two_ranks_stay_apart(
    rank: int, size: int, group: Group
) -> None:
    communicator = _ring_of_two(rank)
    if communicator is None:
        return
    handles = {}
    exchanges = {
        "recv_prev": lambda: communicator.send_forward_recv_forward(
            torch.full((4,), 10.0 + rank), True, (4,), overlap_p2p_comm=True
        ),
        "recv_next": lambda: communicator.send_backward_recv_backward(
            torch.full((4,), 20.0 + rank), True, (4,), overlap_p2p_comm=True
        ),
    }
    # The ranks start them in different orders.
    for name in sorted(exchanges, reverse=bool(rank)):
        handles[name] = exchanges[name]()
    for name, value in (("recv_prev", 10.0), ("recv_next", 20.0)):
        tensor, of_exchange = handles[name]
        of_exchange.pop(name).wait()
        assert tensor.tolist() == [value + 1 - rank] * 4


def handles_have_the_names_that_megatron_looks_for(rank: int, size: int, group: Group) -> None:
    communicator = _ring_of_two(rank)
    if communicator is None:
        return
    tensor, handles = communicator.send_forward_recv_forward(None, False, (4,), True)
    assert (tensor, handles) == (None, {})
    _, forward = communicator.send_forward_recv_forward(torch.ones(4), True, (4,), True)
    assert set(forward) == {"send_next", "recv_prev"}
    _, backward = communicator.send_backward_recv_backward(torch.ones(4), True, (4,), True)
    assert set(backward) == {"send_prev", "recv_next"}
    for handle in (*forward.values(), *backward.values()):
        handle.wait()
    got = communicator.send_forward_recv_forward(torch.full((4,), 3.0), True, (4,))
    assert got.tolist() == [3.0] * 4
    got = communicator.send_backward_recv_backward(torch.full((4,), 5.0), True, (4,))
    assert got.tolist() == [5.0] * 4


def all_four_transfers_at_once(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group)
    from_prev, from_next = communicator.send_forward_backward_recv_forward_backward(
        torch.full((2,), 10.0 + rank), torch.full((2,), 20.0 + rank), True, True, (2,)
    )
    assert from_prev.tolist() == [10.0 + (rank - 1) % size] * 2
    assert from_next.tolist() == [20.0 + (rank + 1) % size] * 2


def large_send_returns_at_once_and_outlives_its_tensor(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group)
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    output = torch.full((16 * _MIB,), float(rank))
    communicator.send_forward(output, last)
    output.data = torch.empty(1)  # As Megatron gives its memory back.
    dist.barrier(group)
    got = communicator.recv_forward(torch.Size([16 * _MIB]), first)
    assert first or bool((got == rank - 1).all())


def missing_gradient_is_refused_at_the_sender(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group)
    with pytest.raises(TensorError, match=f"None.*stage {rank}"):
        communicator.send_backward(None, False)
    with pytest.raises(TensorError, match="None"):
        communicator.send_forward_recv_backward([None], [(2,)], False)


def receive_without_a_dtype_or_shape_is_refused(rank: int, size: int, group: Group) -> None:
    with pytest.raises(ConfigError, match="pipeline_dtype"):
        _communicator(group, pipeline_dtype=None).recv_forward((2,), False)
    with pytest.raises(ConfigError, match="shape None"):
        _communicator(group).send_forward_recv_forward(None, True, None)
    with pytest.raises(TensorError, match="dimensions"):
        _communicator(group, variable_seq_lengths=True).send_forward(torch.ones([1] * 9), False)


def megatrons_timers_are_started_and_stopped(rank: int, size: int, group: Group) -> None:
    calls: Counter[str] = Counter()

    def timers(name: str, log_level: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            start=lambda: calls.update([f"{name} start"]),
            stop=lambda: calls.update([f"{name} stop"]),
        )

    _one_f_one_b(_communicator(group, timers=timers), _batches(False))
    for name in ("forward-recv", "forward-send", "backward-recv", "backward-send"):
        assert calls[f"{name} start"] == calls[f"{name} stop"] > 0


def options_of_the_first_communicator_hold(rank: int, size: int, group: Group) -> None:
    communicator = _communicator(group, BackendOptions(codec="int8", min_nbytes=0))
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    torch.manual_seed(0)
    sent = torch.randn(4, 64)
    communicator.send_forward(sent, last)
    communicator.send_backward(sent, first)
    activations = communicator.recv_forward((4, 64), first)
    gradients = communicator.recv_backward((4, 64), last)
    assert first or 0 < (activations - sent).abs().max() < 0.1
    assert last or torch.equal(gradients, sent)
    # Megatron makes one for every step: with the same options, or with none.
    _communicator(group, BackendOptions(codec="int8", min_nbytes=0))
    P2PCommunicator(group, _config())
    with pytest.raises(ConfigError, match=r"connected with, .*int8.*; got .*int4"):
        _communicator(group, BackendOptions(codec="int4", min_nbytes=0))


CHECKS: tuple[Check, ...] = (
    one_f_one_b_gives_the_gradients_of_the_unsplit_model,
    tensors_may_change_their_shape_at_every_microbatch,
    group_of_another_backend_is_taken_too,
    ranks_are_connected_once_for_all_steps,
    neighbours_and_ends_are_named_as_in_megatron,
    ends_neither_send_nor_receive,
    lists_of_tensors_arrive_as_lists,
    activations_and_gradients_between_two_ranks_stay_apart,
    handles_have_the_names_that_megatron_looks_for,
    all_four_transfers_at_once,
    large_send_returns_at_once_and_outlives_its_tensor,
    missing_gradient_is_refused_at_the_sender,
    receive_without_a_dtype_or_shape_is_refused,
    megatrons_timers_are_started_and_stopped,
    options_of_the_first_communicator_hold,
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(3, CHECKS, world="gloo")


@pytest.mark.parametrize("name", names(CHECKS))
def test_three_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
