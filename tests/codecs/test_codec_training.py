"""What coded boundaries change in training a small network, through the real codec both ways."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

import pytest
import torch

from pipecomm import BackendOptions, Pipeline
from pipecomm.codecs.ops import through

NUM_STEPS = 300
NUM_SEEDS = 3
LAYERS = ((16, 64), (64, 64), (64, 1))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # Tensors this small gain nothing from more.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@functools.cache
def final_losses(codec: str, grad_codec: str) -> torch.Tensor:
    """Mean squared error of a tanh network on a linear target, cut before its last layer.

    The seeds are trained side by side: every tensor has them as its first dimension.
    """
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator)
    rand = functools.partial(torch.rand, generator=generator)
    x = randn(NUM_SEEDS, 512, 16)
    target = x @ randn(NUM_SEEDS, 16, 1) / 4
    weights, biases = (
        [((2 * rand(NUM_SEEDS, r, n) - 1) / m**0.5).requires_grad_() for r, m, n in shapes]
        for shapes in ([(m, m, n) for m, n in LAYERS], [(1, m, n) for m, n in LAYERS])
    )
    optimizer = torch.optim.Adam([*weights, *biases], lr=1e-3)
    for step in range(NUM_STEPS):
        hidden = x
        for layer in (0, 1):
            hidden = torch.tanh(hidden @ weights[layer] + biases[layer])
        arrived = through(hidden, codec, grad_codec, seed=step, grad_seed=step)
        losses = (arrived @ weights[2] + biases[2] - target).square().mean((1, 2))
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    return losses.detach()


@pytest.mark.parametrize(
    ("codec", "grad_codec", "bound"),
    [
        ("int8", "raw", 0.02),
        ("int8", "int8", 0.02),
        ("int4", "raw", 0.15),
        ("int4", "int4:rounding=stochastic", 0.15),
    ],
)
def test_final_loss_is_close_to_that_without_a_codec(
    codec: str, grad_codec: str, bound: float
) -> None:
    raw = final_losses("raw", "raw")
    # The network has learnt: the target's variance is about 1.
    assert (raw < 0.01).all()
    change = final_losses(codec, grad_codec) / raw - 1
    assert (change.abs() <= bound).all(), change
    assert (change != 0).all()


def test_nothing_is_quantized_unasked() -> None:
    defaults = inspect.signature(Pipeline).parameters
    for name in ("codec", "grad_codec"):
        assert str(defaults[name].default) == "raw"
        assert str(getattr(BackendOptions(), name)) == "raw"
