"""I and W together give what a whole backward gives, bit for bit, and W really has the weights."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomm.engine.backward import Backward
from pipecomm.engine.split_backward import SplitBackward
from tests.engine.split_cases import CASES, WIDTH, Chain, floats, linear, mlp, shared

NUM_MICROBATCHES = 2


def outputs_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs if y.requires_grad
    ]


@contextmanager
def split_of(module: nn.Module, name: str = "stage 0") -> Iterator[SplitBackward]:
    split = SplitBackward(module, name)
    split.begin()
    try:
        yield split
    finally:
        split.end()


def backward_input(split: SplitBackward, i: int, module: nn.Module, inputs: Any) -> Any:
    outputs = outputs_of(module, inputs)
    backward = Backward.between(inputs, outputs)
    gradients = gradients_for(outputs)
    del outputs
    with split.keeping(i):
        return backward.run(gradients)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def whole(module: nn.Module, batches: Any) -> tuple[list[Any], dict[str, Tensor | None]]:
    of_inputs = []
    for inputs in batches:
        outputs = outputs_of(module, inputs)
        of_inputs.append(Backward.between(inputs, outputs).run(gradients_for(outputs)))
    return of_inputs, gradients_of(module)


def assert_same(got: Any, expected: Any, name: str = "") -> None:
    if expected is None:
        assert got is None, name
    else:
        assert got is not None, name
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), (name, (got - expected).abs().max())


def batches_of(name: str) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return [CASES[name].inputs() for _ in range(NUM_MICROBATCHES)]


def fresh(batches: Any) -> Any:
    return [[x.detach().requires_grad_(x.requires_grad) for x in inputs] for inputs in batches]


@pytest.mark.parametrize("name", CASES)
def test_parts_give_bit_for_bit_what_a_whole_backward_gives(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make()
    same = copy.deepcopy(module)
    batches = batches_of(name)
    of_inputs, expected = whole(same, fresh(batches))
    with warnings.catch_warnings(), split_of(module) as split:
        warnings.simplefilter("ignore")
        for i, inputs in enumerate(fresh(batches)):
            got = backward_input(split, i, module, inputs)
            for gradient, other in zip(got, of_inputs[i], strict=True):
                assert_same(gradient, other)
        early = {key for key, value in gradients_of(module).items() if value is not None}
        for i in range(NUM_MICROBATCHES):
            split.finish(i)
    everything = {key for key, value in expected.items() if value is not None}
    assert early == (everything if case.early == ("*",) else set(case.early))
    for key, gradient in gradients_of(module).items():
        if name == "used as function" and key == "layer.weight":
            # Two additions to .grad in place of one of the sum.
            torch.testing.assert_close(gradient, expected[key])
        else:
            assert_same(gradient, expected[key], key)


def test_cases_cover_each_class_of_layers() -> None:
    found = {type(part) for case in CASES.values() for part in case.make().modules()}
    assert found >= {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding}


def test_graph_is_free_after_the_first_part() -> None:
    seen: list[Any] = []

    def run(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        middle = h.exp()
        result = self.second(middle)
        seen.extend(weakref.ref(t) for t in (h, middle))
        return result

    module = Chain(run, first=linear(), second=linear())
    gc.disable()
    try:
        with split_of(module) as split:
            (gradient,) = backward_input(split, 0, module, floats(4, WIDTH)())
            # exp() has saved its result, which the second layer keeps the memory of for W.
            assert [watch() is None for watch in seen] == [True, True]
            split.finish(0)
    finally:
        gc.enable()
    assert gradient.shape == (4, WIDTH)


def test_what_is_kept_is_gone_after_the_second_part() -> None:
    module = mlp()
    (x,) = floats(4, WIDTH)()
    watch = weakref.ref(x)
    with split_of(module) as split:
        backward_input(split, 0, module, [x])
        del x
        kept = weakref.ref(split._kept[0][0].x)
        assert kept() is not None
        split.finish(0)
        assert kept() is None
        assert watch() is None


def test_hooks_run_once_for_each_microbatch() -> None:
    module, calls = mlp(), []
    weight = module[0].weight  # type: ignore[index]

    def watch(output: Tensor) -> None:
        output.register_hook(lambda g: calls.append("between") or g * 3)

    weight.register_hook(lambda g: calls.append("tensor") or g * 2)
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    module.register_full_backward_hook(lambda m, gi, go: calls.append("module"))
    module[0].register_full_backward_hook(lambda m, gi, go: calls.append("layer"))  # type: ignore[index]
    module[1].register_forward_hook(  # type: ignore[index]
        lambda m, i, o: watch(o)
    )
    batches = batches_of("mlp")
    _, expected = whole(module, fresh(batches))
    module.zero_grad()
    counts = {name: calls.count(name) for name in set(calls)}
    assert set(counts) == {"tensor", "accumulated", "module", "layer", "between"}
    calls.clear()
    with split_of(module) as split:
        for i, inputs in enumerate(fresh(batches)):
            backward_input(split, i, module, inputs)
        assert "tensor" not in calls
        for i in range(NUM_MICROBATCHES):
            split.finish(i)
    assert {name: calls.count(name) for name in set(calls)} == counts
    for name, gradient in gradients_of(module).items():
        assert_same(gradient, expected[name], name)


def test_many_weight_gradients_are_not_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is added as soon as there are enough; a shared weight's only together."""
    monkeypatch.setattr("pipecomm.engine.split_backward._MAX_PENDING_NBYTES", 1)
    order: list[str] = []
    module = nn.Sequential(linear(False), shared(False)(), linear(False))
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    with split_of(module) as split:
        backward_input(split, 0, module, floats(4, WIDTH)())
        split.finish(0)
    assert order == ["2.weight", "0.weight", "1.layer.weight"]


def test_module_is_as_it_was_afterwards() -> None:
    module = mlp()
    before = {id(part): dict(vars(part)) for part in module.modules()}
    with split_of(module):
        assert any("forward" in vars(part) for part in module.modules())
    assert {id(part): dict(vars(part)) for part in module.modules()} == before
    pickle.dumps(module)


def test_evaluation_within_a_step_takes_the_plain_way() -> None:
    module = linear()
    with split_of(module), torch.no_grad():
        assert not module(torch.randn(2, WIDTH)).requires_grad


def test_forward_of_its_own_is_left_alone() -> None:
    layer = linear()
    layer.forward = lambda x: x * 2  # type: ignore[method-assign]
    with split_of(layer):
        assert layer(torch.ones(2, WIDTH)).tolist() == [[2.0] * WIDTH] * 2
    assert "forward" in vars(layer)


def test_gradient_taken_in_the_forward_asks_for_no_weights() -> None:
    def run(self: Any, x: Tensor) -> Any:
        (force,) = torch.autograd.grad(self.layer(x).sum(), x)
        return self.layer(x) + force

    module = Chain(run, layer=linear())
    same = copy.deepcopy(module)
    batches = [floats(4, WIDTH)()]
    _, expected = whole(same, fresh(batches))
    with split_of(module) as split:
        backward_input(split, 0, module, fresh(batches)[0])
        split.finish(0)
    for name, gradient in gradients_of(module).items():
        assert_same(gradient, expected[name], name)


def test_gradient_of_a_gradient_is_refused_not_wrong() -> None:
    def run(self: Any, x: Tensor) -> Any:
        (slope,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        return slope

    module = Chain(run, layer=linear())
    with split_of(module) as split, pytest.raises(RuntimeError, match="once_differentiable"):
        backward_input(split, 0, module, floats(4, WIDTH)())


def test_weight_changed_in_place_between_forward_and_backward_is_refused() -> None:
    module = linear()
    with split_of(module) as split:
        inputs = floats(4, WIDTH)()
        outputs = outputs_of(module, inputs)
        with torch.no_grad():
            module.weight.mul_(2)
        with split.keeping(0), pytest.raises(RuntimeError, match="inplace"):
            Backward.between(inputs, outputs).run(gradients_for(outputs))


def test_nothing_is_left_of_a_step_that_ended_early() -> None:
    module = mlp()
    split = SplitBackward(module, "stage 0")
    split.begin()
    backward_input(split, 0, module, floats(4, WIDTH)())
    split.end()
    split.end()
    split.begin()
    with pytest.raises(KeyError):
        split.finish(0)
    split.end()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("compiled", "torch.compile makes one backward of both"),
        ("functions", "weights used by functions"),
        ("padded otherwise", "they are not those of Linear"),
    ],
)
def test_stage_of_which_little_can_wait_is_told_once_why(name: str, why: str) -> None:
    module = CASES[name].make()
    split = SplitBackward(module, "stage 3 of 4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            split.begin()
            for i, inputs in enumerate(fresh(batches_of(name))):
                backward_input(split, i, module, inputs)
                split.finish(i)
            split.end()
    (warning,) = [w for w in caught if "stage 3 of 4" in str(w.message)]
    assert why in str(warning.message)


def test_stage_of_which_most_can_wait_is_not_told() -> None:
    module = mlp()
    with warnings.catch_warnings(), split_of(module) as split:
        warnings.simplefilter("error")
        backward_input(split, 0, module, floats(4, WIDTH)())
        split.finish(0)
