"""A backward pass by itself: from gradients of outputs to gradients of inputs."""

from __future__ import annotations

import torch

from pipecomm.engine.backward import Backward, warm_up_backward


def test_only_tensors_that_require_a_gradient_take_part() -> None:
    x, ids = torch.ones(2, requires_grad=True), torch.arange(2)
    backward = Backward.between([x, ids], [x * 3, ids + 1])
    assert len(backward.leaves) == len(backward.edges) == len(backward.devices) == 1
    (gradient,) = backward.run([torch.ones(2)])
    assert gradient is not None
    assert gradient.tolist() == [3, 3]


def test_absent_gradients_run_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    assert Backward.between([x], [x * 3]).run([None]) == (None,)


def test_warm_up_works_whatever_the_grad_mode() -> None:
    with torch.no_grad():
        warm_up_backward()
        assert not torch.is_grad_enabled()
