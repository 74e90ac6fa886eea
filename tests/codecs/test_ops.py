"""Codecs as torch operators: schemas, fake shapes, graphs, gradients, vmap, autocast, wrong use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from pipecomm._native import core
from pipecomm.codecs import ops as codec_ops
from pipecomm.codecs.codec import Codec
from tests.codecs.codec_reference import FLOATS, QUANTIZING, round_trip

MORE = (
    "int4-symmetric",
    "fp8",
    "nf4",
    "int4:hadamard=64",
    "int4:spikes=1",
    "int8:group=128,spikes=4",
    "int8:rounding=stochastic,seed=5",
)
NAMES = ("raw", *dict.fromkeys((*QUANTIZING, *MORE)))
SHAPES = ((), (0,), (1,), (2, 0), (0, 70), (3, 5, 771), (8, 128))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# What torch itself checks: schemas, aliasing, fake against real, autograd, symbolic shapes


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float32), ((0,), torch.float16), ((1,), torch.bfloat16), ((3, 71), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", ["raw", "int8", "int4", "int4-symmetric:hadamard=64"])
def test_opcheck_passes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    opcheck(torch.ops.pipecomm.encode.default, (x, name))
    wire = codec_ops.encode(x, name)
    opcheck(torch.ops.pipecomm.decode.default, (wire, list(shape), dtype, name))
    leaf = x.requires_grad_()
    opcheck(torch.ops.pipecomm.through.default, (leaf, name, "int8", None, 3))


def test_opcheck_passes_for_integers_seeds_and_layouts() -> None:
    opcheck(torch.ops.pipecomm.encode.default, (torch.arange(6).view(2, 3), "raw"))
    opcheck(torch.ops.pipecomm.encode.default, (randn(6, 70).t(), "int4", 2**63 - 1))
    opcheck(torch.ops.pipecomm.through.default, (randn(70, 6).t(), "int8:group=32", "raw"))


# Sizes


@pytest.mark.parametrize("name", NAMES[1:])
def test_formula_gives_the_bytes_of_the_core(name: str) -> None:
    for rows in (0, 1, 2, 7, 8, 9, 1000):
        for cols in (*range(131), 255, 256, 257, 771, 2**31):
            expected = core.codec_wire_nbytes(Codec(name).name, rows, cols)
            assert codec_ops._wire_nbytes(name, (rows, cols), torch.float32) == expected


@pytest.mark.parametrize("name", NAMES)
def test_fake_results_look_like_real_ones(name: str) -> None:
    for shape in SHAPES:
        for dtype in FLOATS:
            x = randn(*shape, dtype=dtype).transpose(0, -1) if shape else randn(dtype=dtype)
            real = torch.ops.pipecomm.encode(x, name)
            back = torch.ops.pipecomm.decode(real, x.shape, dtype, name)
            with FakeTensorMode() as mode:
                fake_x = mode.from_tensor(x)
                fake = torch.ops.pipecomm.encode(fake_x, name)
                fake_back = torch.ops.pipecomm.decode(fake, x.shape, dtype, name)
                fake_through = torch.ops.pipecomm.through(fake_x, name, "raw")
            for left, right in ((fake, real), (fake_back, back), (fake_through, back)):
                assert (left.shape, left.dtype) == (right.shape, right.dtype)
                assert left.stride() == right.stride()


def test_meta_tensors_give_meta_tensors() -> None:
    wire = codec_ops.encode(torch.empty(3, 70, device="meta"), "int4")
    assert wire.is_meta
    assert wire.shape == (Codec("int4").wire_nbytes((3, 70), torch.float32),)


# Values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_operators_do_what_the_codec_does(name: str, shape: tuple[int, ...]) -> None:
    for dtype in FLOATS:
        x = randn(*shape, dtype=dtype)
        before = x.clone()
        wire = torch.ops.pipecomm.encode(x, name)
        assert torch.equal(wire, Codec(name).encode(x))
        back = torch.ops.pipecomm.decode(wire, list(shape), dtype, name)
        assert torch.equal(back, round_trip(name, x))
        assert torch.equal(codec_ops.through(x, name, "raw"), back)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_one_element_or_none_are_taken_whatever_their_strides(name: str) -> None:
    for x in (
        randn(9)[::5][:1],
        randn(4, 6)[:1, ::6],
        randn(4, 6).t()[:1, :1],
        randn(1).expand(4)[:0],
    ):
        assert torch.equal(codec_ops.through(x, name, "raw"), round_trip(name, x.clone()))


def test_results_never_share_memory_with_the_input() -> None:
    x = randn(4, 64)
    wire = codec_ops.encode(x, "raw")
    results = (wire, codec_ops.decode(wire, [4, 64], x.dtype, "raw"))
    for result in (*results, codec_ops.through(x, "raw", "raw")):
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert results[1].untyped_storage().data_ptr() != wire.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.uint8, torch.float64, torch.complex64], ids=str
)
def test_through_leaves_what_no_codec_takes_as_it_is(dtype: torch.dtype) -> None:
    x = torch.ones(3, 70).to(dtype)
    assert codec_ops.through(x, "int4", "int8") is x


# Seeds


def test_a_seed_takes_the_place_of_the_codecs_own() -> None:
    x, name = randn(4, 70), "int4-symmetric:rounding=stochastic"
    assert torch.equal(codec_ops.encode(x, name, 9), Codec(name).encode(x, seed=9))
    assert torch.equal(codec_ops.encode(x, f"{name},seed=9"), codec_ops.encode(x, name, 9))
    draws = [codec_ops.through(x, name, "raw", seed=seed) for seed in (None, None, 0, 1, 2**63 - 1)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[2], draws[3])
    assert not torch.equal(draws[3], draws[4])


def test_the_gradient_has_a_seed_of_its_own() -> None:
    name = "int8:rounding=stochastic"
    upstream = randn(4, 70)
    grads = []
    for seed, grad_seed in ((1, 2), (3, 2), (1, 4)):
        x = randn(4, 70).requires_grad_()
        codec_ops.through(x, name, name, seed=seed, grad_seed=grad_seed).backward(upstream)
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])
    wire = Codec(name).encode(upstream, seed=2)
    assert torch.equal(grads[0], Codec(name).decode(wire, torch.empty_like(upstream)))


# Gradients


@pytest.mark.parametrize("grad_name", NAMES)
@pytest.mark.parametrize("name", ["raw", "int4"])
def test_gradient_of_through_is_coded_and_otherwise_passes(name: str, grad_name: str) -> None:
    for dtype in FLOATS:
        x = randn(5, 71, dtype=dtype).requires_grad_()
        upstream = randn(71, 5, dtype=dtype).t()
        y = codec_ops.through(x, Codec(name), Codec(grad_name))
        assert torch.equal(y, round_trip(name, x.detach()))
        y.backward(upstream)
        assert torch.equal(x.grad, round_trip(grad_name, upstream.contiguous()))


def test_second_derivative_goes_forward_through_the_first_codec() -> None:
    x = randn(2, 64).requires_grad_()
    upstream = randn(2, 64).requires_grad_()
    (grad,) = torch.autograd.grad(
        codec_ops.through(x, "int4", "int8"), x, upstream, create_graph=True
    )
    weights = torch.linspace(-1, 3, 128).view(2, 64)
    (second,) = torch.autograd.grad(grad, upstream, weights)
    assert torch.equal(grad, round_trip("int8", upstream.detach()))
    assert torch.equal(second, round_trip("int4", weights))


def test_encode_takes_part_in_no_graph() -> None:
    x = randn(4, 64).requires_grad_()
    assert not codec_ops.encode(x * 1.0, "int8").requires_grad
    assert not codec_ops.through(x.detach(), "int8", "int8").requires_grad
    with torch.no_grad():
        assert not codec_ops.through(x, "int8", "int8").requires_grad


def test_nan_and_infinity_come_through_as_the_codec_has_them() -> None:
    x = torch.ones(2, 64).requires_grad_()
    upstream = torch.ones(2, 64)
    upstream[1, 3] = float("inf")
    codec_ops.through(x, "int8", "int8").backward(upstream)
    assert x.grad[1].isnan().all()
    assert x.grad[0].isfinite().all()


# Graphs


def model(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = codec_ops.through(torch.relu(x @ weight), "int4", "int8")
    wire = torch.ops.pipecomm.encode(y.view(-1, 2, y.shape[-1]) * 2, "int8:group=32")
    back = torch.ops.pipecomm.decode(wire, y.shape, y.dtype, "int8:group=32")
    return (y * back.detach()).sum(), wire


def assert_compiled_equals_eager(backend: str, sizes: tuple[int, ...]) -> None:
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for cols in sizes:
        x = randn(6, 16)
        weights = [randn(16, cols).requires_grad_() for _ in range(2)]
        loss, wire = model(x, weights[0])
        other_loss, other_wire = compiled(x, weights[1])
        loss.backward()
        other_loss.backward()
        assert torch.equal(wire, other_wire)
        assert torch.allclose(loss, other_loss)
        assert torch.allclose(weights[0].grad, weights[1].grad, rtol=1e-5, atol=1e-6)


def test_a_full_graph_is_compiled_once_for_all_lengths_of_the_last_dimension() -> None:
    torch._dynamo.utils.counters.clear()
    assert_compiled_equals_eager("aot_eager", (40, 71, 33, 128))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Inductor's own imports warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_through_and_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(
        lambda x: codec_ops.through(x, "int4", "int8"), fullgraph=True, backend="inductor"
    )
    x = randn(6, 70).requires_grad_()
    upstream = randn(6, 70)
    y = compiled(x)
    y.backward(upstream)
    assert torch.equal(y, round_trip("int4", x.detach()))
    assert torch.equal(x.grad, round_trip("int8", upstream))


def test_seeds_that_change_do_not_compile_again_and_again() -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda x, seed: codec_ops.through(x, "int8", "int8", seed=seed),
        fullgraph=True,
        backend="aot_eager",
    )
    for seed in range(6):
        assert torch.equal(compiled(randn(2, 64), seed), round_trip("int8", randn(2, 64)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_codec_made_outside_the_graph_can_be_used_in_it() -> None:
    codec = Codec("int8")
    compiled = torch.compile(
        lambda x: codec_ops.through(x, codec, codec), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(randn(2, 70)), round_trip("int8", randn(2, 70)))


def test_exported_program_takes_other_shapes() -> None:
    class Encode(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.pipecomm.encode(x, "int4")

    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("cols", min=2, max=2000)}
    program = torch.export.export(Encode(), (randn(4, 70),), dynamic_shapes=(sizes,))
    x = randn(3, 771)
    assert torch.equal(program.module()(x), Codec("int4").encode(x))


# Transforms and modes


# Stochastic rounding draws as the calls do: one for all parts in `through`.
@pytest.mark.parametrize("name", [name for name in NAMES if "stochastic" not in name])
def test_vmap_gives_what_one_call_for_each_gives(name: str) -> None:
    x = randn(4, 3, 70)
    wires = torch.vmap(lambda part: codec_ops.encode(part, name), in_dims=1)(x)
    parts = x.unbind(1)
    assert torch.equal(wires, torch.stack([Codec(name).encode(part) for part in parts]))
    back = torch.vmap(lambda wire: codec_ops.decode(wire, [4, 70], torch.float32, name), in_dims=1)(
        wires.t()
    )
    expected = torch.stack([round_trip(name, part) for part in parts])
    assert torch.equal(back, expected)
    through = torch.vmap(lambda part: codec_ops.through(part, name, "raw"), in_dims=1)(x)
    assert torch.equal(through, expected)


def test_vmap_over_single_numbers_keeps_their_scales_apart() -> None:
    x = torch.tensor([1e-3, 5.0, -700.0])
    through = torch.vmap(lambda value: codec_ops.through(value, "int8", "raw"))(x)
    assert torch.equal(through, torch.stack([round_trip("int8", value) for value in x]))
    assert through[0] > 0


def test_functional_gradients_are_refused_by_torch() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return codec_ops.through(x, "int8", "raw").sum()

    with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
        torch.func.grad(total)(randn(2, 64))


def test_autocast_does_not_change_what_is_coded() -> None:
    x = randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = codec_ops.through(x, "int8", "raw")
        wire = codec_ops.encode(x.half(), "int8")
    assert torch.equal(y, round_trip("int8", x))
    assert torch.equal(wire, Codec("int8").encode(x.half()))
