"""One stage at a time: what it keeps between forward and backward, and what may leave it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.stage import Stage, as_received, boundary_tensors


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def no_loss(microbatch: int, output: Any) -> Tensor | None:
    return None


def summed(microbatch: int, output: Tensor) -> Tensor:
    return output.sum()


def received(*shape: int) -> Tensor:
    """A tensor as a link delivers it: a leaf."""
    return torch.randn(*shape, requires_grad=True)


class Call(nn.Module):
    """A module that is one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def middle(function: Any) -> Stage:
    return Stage(Call(function), 1, 3)


@pytest.mark.usefixtures("_no_collector")
def test_forward_output_is_free_as_soon_as_it_is_dropped() -> None:
    stage = Stage(nn.Linear(4, 4), 0, 2)
    (output,) = stage.forward(0, (torch.randn(2, 4),), {}, no_loss, keeps=True)
    watch = weakref.ref(output)
    del output
    assert watch() is None
    stage.backward(0, [torch.ones(2, 4)])
    assert stage.module.weight.grad is not None


@pytest.mark.usefixtures("_no_collector")
def test_received_input_is_free_after_backward() -> None:
    stage = Stage(nn.Linear(4, 4), 1, 3)
    leaf = received(2, 4)
    watch = weakref.ref(leaf)
    stage.forward(0, [leaf], {}, no_loss, keeps=True)
    del leaf
    (gradient,) = stage.backward(0, [torch.ones(2, 4)])
    assert watch() is None
    assert gradient is not None


def test_backward_gives_a_gradient_for_each_input_that_requires_one() -> None:
    stage = middle(lambda a, ids, b: (a * 2, ids, b * 3))
    stage.forward(0, [received(2), torch.arange(2), received(2)], {}, no_loss, keeps=True)
    assert stage.num_gradients(0) == 2
    first, second = stage.backward(0, [torch.ones(2), torch.ones(2)])
    assert first.tolist() == [2, 2]
    assert second.tolist() == [3, 3]


def test_input_returned_untouched_adds_up_both_paths() -> None:
    stage = middle(lambda x: (x * 2, x))
    stage.forward(0, [received(2)], {}, no_loss, keeps=True)
    (gradient,) = stage.backward(0, [torch.ones(2), torch.full((2,), 10.0)])
    assert gradient.tolist() == [12, 12]


def test_next_stage_of_the_rank_gets_leaves_of_the_same_memory() -> None:
    made = received(2) * 2
    ids = torch.arange(2)
    first, none, second = as_received((made, None, ids), torch.device("cpu"))
    assert none is None
    assert first is not None
    assert second is not None
    assert (first.is_leaf, first.requires_grad, second.requires_grad) == (True, True, False)
    assert first.data_ptr() == made.data_ptr()
    assert second.data_ptr() == ids.data_ptr()


def test_forward_keeps_what_it_is_told_whatever_the_grad_mode_of_torch() -> None:
    stage = middle(lambda x: x * 2)
    with torch.no_grad():
        stage.forward(0, [received(2)], {}, no_loss, keeps=True)
        stage.forward(1, [received(2)], {}, no_loss, keeps=False)
    assert [stage.num_gradients(microbatch) for microbatch in (0, 1)] == [1, 0]
    (gradient,) = stage.backward(0, [torch.ones(2)])
    assert gradient.tolist() == [2, 2]


def test_backward_of_the_last_stage_starts_from_the_gradient_it_is_given() -> None:
    stage = Stage(Call(lambda x: x * 2), 1, 2)
    stage.forward(0, [received(2)], {}, summed, keeps=True)
    (gradient,) = stage.backward(0, [torch.full((), 8.0)])
    assert gradient.tolist() == [16, 16]


def test_same_tensor_returned_twice_adds_up() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    stage = middle(twice)
    stage.forward(0, [received(2)], {}, no_loss, keeps=True)
    (gradient,) = stage.backward(0, [torch.ones(2), torch.ones(2)])
    assert gradient.tolist() == [4, 4]


def test_absent_gradient_leaves_the_other_paths() -> None:
    stage = middle(lambda x: (x * 2, x * 3))
    stage.forward(0, [received(2)], {}, no_loss, keeps=True)
    (gradient,) = stage.backward(0, [None, torch.ones(2)])
    assert gradient.tolist() == [3, 3]


def test_input_without_influence_gets_an_absent_gradient() -> None:
    stage = middle(lambda a, b: a * 2)
    stage.forward(0, [received(2), received(2)], {}, no_loss, keeps=True)
    first, second = stage.backward(0, [torch.ones(2)])
    assert first is not None
    assert second is None


def test_stage_where_nothing_requires_a_gradient_expects_and_gives_none() -> None:
    stage = middle(lambda x: x * 2)
    stage.forward(0, [torch.zeros(2)], {}, no_loss, keeps=True)
    assert stage.num_gradients(0) == 0
    assert stage.backward(0, []) == ()


def test_outputs_cut_from_the_inputs_still_give_absent_gradients() -> None:
    stage = middle(lambda x: x.detach())
    stage.forward(0, [received(2)], {}, no_loss, keeps=True)
    assert stage.num_gradients(0) == 0
    assert stage.backward(0, []) == (None,)


def test_last_stage_starts_from_the_loss() -> None:
    stage = Stage(Call(lambda x: x * 2), 1, 2)
    assert stage.forward(0, [received(2)], {}, summed, keeps=True) == ()
    assert stage.num_gradients(0) == 0
    (gradient,) = stage.backward(0, [torch.ones(())])
    assert gradient.tolist() == [2, 2]


def test_last_stage_may_return_what_its_loss_takes() -> None:
    stage = Stage(Call(lambda x: {"logits": x}), 1, 2)
    stage.forward(0, [received(2)], {}, lambda _, output: output["logits"].sum(), keeps=True)
    assert stage.backward(0, [torch.ones(())])[0].tolist() == [1, 1]


def test_microbatches_are_kept_apart() -> None:
    stage = middle(lambda x: x * x)
    for microbatch, value in enumerate((1.0, 10.0)):
        leaf = torch.full((1,), value, requires_grad=True)
        stage.forward(microbatch, [leaf], {}, no_loss, keeps=True)
    assert stage.backward(1, [torch.ones(1)])[0].item() == 20
    assert stage.backward(0, [torch.ones(1)])[0].item() == 2


def test_without_autograd_nothing_is_kept_and_outputs_require_nothing() -> None:
    stage = middle(lambda x: x)
    leaf = received(2)
    (output,) = stage.forward(0, [leaf], {}, no_loss, keeps=False)
    assert not output.requires_grad
    assert stage.num_gradients(0) == 0
    with pytest.raises(KeyError):
        stage.backward(0, [])


@pytest.mark.usefixtures("_no_collector")
def test_forget_drops_unfinished_microbatches() -> None:
    stage = middle(lambda x: x * 2)
    leaf = received(2)
    watch = weakref.ref(leaf)
    stage.forward(0, [leaf], {}, no_loss, keeps=True)
    del leaf
    assert watch() is not None
    stage.forget()
    assert watch() is None


@dataclass
class Record:
    h: Tensor


@pytest.mark.parametrize("output", [torch.zeros(2), (torch.zeros(2),), [torch.zeros(2)]])
def test_tensors_may_travel(output: Any) -> None:
    (tensor,) = boundary_tensors(output, 0)
    assert tensor is output or tensor is output[0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "NoneType"),
        (7, "int"),
        (True, "bool"),
        ("text", "str"),
        ({"h": torch.zeros(2)}, "dict"),
        (Record(torch.zeros(2)), "Record"),
    ],
)
def test_other_types_are_refused_by_name_alone_and_at_their_position(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"from stage 4; got {kind}\."):
        boundary_tensors(value, 4)
    with pytest.raises(TypeError, match=rf"from stage 4; got {kind} at position 1\."):
        boundary_tensors((torch.zeros(2), value), 4)


@pytest.mark.parametrize("output", [(), []])
def test_output_of_nothing_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match="from stage 4; got nothing"):
        boundary_tensors(output, 4)


def test_sparse_tensor_is_refused_by_its_layout() -> None:
    sparse = torch.eye(3).to_sparse()
    for output, where in ((sparse, ""), ((torch.zeros(2), sparse), " at position 1")):
        with pytest.raises(TypeError, match=f"a tensor of layout torch.sparse_coo{where}"):
            boundary_tensors(output, 4)


def test_documented_refusals_are_those_tested_here() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "engine.md"
    table = page.read_text(encoding="utf-8").split("## What travels")[1].split("## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if "TypeError" in line]
    assert rows == [
        "`None`", "an int", "a bool", "a str", "a dict", "a dataclass", "a tuple inside the tuple",
        "an empty tuple", "a sparse tensor", "a wrapper or other tensor without memory of its own",
    ]  # fmt: skip


def test_change_of_the_input_in_place_is_refused_by_autograd() -> None:
    stage = middle(lambda x: x.mul_(2))
    with pytest.raises(RuntimeError, match="in-place"):
        stage.forward(0, [received(2)], {}, no_loss, keeps=True)


def test_nested_tuple_is_refused_at_its_position() -> None:
    with pytest.raises(TypeError, match=r"from stage 4; got tuple at position 1\."):
        boundary_tensors((torch.zeros(2), (torch.zeros(2),)), 4)
