"""What codecs take: layouts, threads, instruction sets, raw bytes of any dtype, wrong use."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm._native import core
from pipecomm.codecs.codec import Codec
from pipecomm.errors import ConfigError, TensorError
from tests.codecs.codec_reference import FLOATS, QUANTIZING, round_trip
from tests.patience import patient

# Layouts, devices, threads

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(128, 96).t(),
    "every second row": lambda: torch.randn(64, 96)[::2],
    "every second column": lambda: torch.randn(32, 192)[:, ::2],
    "channels last": lambda: torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last),
    "offset": lambda: torch.randn(1 + 32 * 70)[1:].view(32, 70),
    "flipped": lambda: torch.randn(32, 70).flip(1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["raw", *QUANTIZING])
def test_layout_of_the_tensor_does_not_matter(name: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    codec = Codec(name)
    wire = codec.encode(x)
    assert torch.equal(wire, codec.encode(x.clone(memory_format=torch.contiguous_format)))
    expected = codec.decode(wire, torch.empty(x.shape))
    out = LAYOUTS[layout]()
    assert codec.decode(wire, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["raw", *QUANTIZING])
def test_expanded_tensors_are_encoded_as_their_copies(name: str) -> None:
    x = torch.randn(1, 64).expand(32, 64)
    assert torch.equal(Codec(name).encode(x), Codec(name).encode(x.contiguous()))


@pytest.mark.parametrize("name", [*QUANTIZING, "int4:spikes=1"])
def test_wire_may_start_at_any_byte(name: str) -> None:
    x = torch.randn(9, 200)
    codec = Codec(name)
    wire = codec.encode(x)
    for offset in (1, 2, 7, 15):
        room = torch.full((wire.numel() + 32,), 0xA5, dtype=torch.uint8)
        part = room[offset : offset + wire.numel()]
        assert torch.equal(codec.encode(x, part), wire)
        assert torch.equal(codec.decode(part, torch.empty_like(x)), round_trip(name, x))
        assert (room[:offset] == 0xA5).all()
        assert (room[offset + wire.numel() :] == 0xA5).all()


def test_threads_encode_side_by_side() -> None:
    xs = [torch.randn(200, 300) for _ in range(4)]
    expected = [Codec("int4").encode(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for got, wire in zip(pool.map(Codec("int4").encode, xs), expected, strict=True):
                assert torch.equal(got, wire)


ISA_CODECS = (
    "int8",
    "int4",
    "fp8",
    "nf4",
    "int4:hadamard=64",
    "int4:spikes=2",
    "int8:rounding=stochastic",
)

# Of operations that round exactly: the same values in every process, whatever computes them.
ISA_INPUT = "torch.arange(9000.0).mul(7919).remainder(2003).sub(1001).div(143).view(3, 3000)"


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import torch; from pipecomm._native import core; from pipecomm.codecs.codec import Codec\n"
        f"x = {ISA_INPUT}\n"
        f"for n in {ISA_CODECS}:\n"
        "    w = Codec(n).encode(x); y = Codec(n).decode(w, torch.empty_like(x))\n"
        "    print(core.codec_isa(), w.numpy().tobytes().hex(), y.numpy().tobytes().hex())\n"
    )
    env = os.environ | {"PIPECOMM_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=patient(120)
    )


def test_a_forced_instruction_set_gives_the_same_bytes() -> None:
    lines = run_with_isa("portable").stdout.splitlines()
    assert len(lines) == len(ISA_CODECS)
    x = eval(ISA_INPUT)
    for name, line in zip(ISA_CODECS, lines, strict=True):
        isa, wire, decoded = line.split()
        assert isa == "portable"
        assert Codec(name).encode(x).numpy().tobytes().hex() == wire
        assert round_trip(name, x).numpy().tobytes().hex() == decoded


def test_an_unknown_instruction_set_is_a_config_error() -> None:
    result = run_with_isa("mmx")
    assert result.returncode != 0
    assert "ConfigError" in result.stderr
    assert "portable" in result.stderr
    assert '"mmx"' in result.stderr


def test_the_instruction_set_in_use_is_one_that_can_run() -> None:
    assert core.codec_isas()[0] == "portable"
    assert core.codec_isa() in core.codec_isas()


# raw

RAW_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.mark.parametrize("dtype", RAW_DTYPES, ids=str)
def test_raw_keeps_every_bit_of_every_dtype(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (24, 5, 16), dtype=torch.uint8)
    x = bits.view(dtype)
    wire = Codec("raw").encode(x)
    assert torch.equal(wire, bits.view(-1))
    decoded = Codec("raw").decode(wire, torch.empty_like(x))
    assert torch.equal(decoded.view(torch.uint8), bits)


def test_raw_keeps_a_scalar_and_a_conjugate_view() -> None:
    scalar = torch.tensor(7, dtype=torch.int64)
    assert round_trip("raw", scalar).item() == 7
    x = torch.tensor([1 + 2j, -3j])
    decoded = Codec("raw").decode(Codec("raw").encode(x.conj()), torch.zeros_like(x))
    assert torch.equal(decoded, x.conj())


# Names and wrong use


def test_codecs_of_one_meaning_are_equal_and_hash_alike() -> None:
    assert Codec("int8:group=64") == Codec("int8") != Codec("int4")
    assert len({Codec("int8:group=64"), Codec("int8"), Codec.parse("int8")}) == 1
    assert Codec("int8:group=64").name == str(Codec("int8")) == "int8"
    assert Codec.parse(Codec("int4")) == Codec("int4")
    assert pickle.loads(pickle.dumps(Codec("int4"))) == copy.deepcopy(Codec("int4"))
    with pytest.raises(AttributeError):
        Codec("int4").name = "raw"  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int2",
        "int8:group=0",
        "int8:group=-1",
        "int8:group=48",
        "int8:group=1",
        "int8:group=18446744073709551616",
        "int4:group=64",
        "raw:group=32",
        "int8,group=32",
    ],
)
def test_an_unknown_codec_is_a_config_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=r'"raw", "int8".*"int4"') as caught:
        Codec(name)
    assert f'"{name}"' in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_codec_needs_text() -> None:
    with pytest.raises(ConfigError, match="got None"):
        Codec(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", QUANTIZING)
def test_other_dtypes_are_refused_by_quantizing_codecs(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64).to(dtype)
    with pytest.raises(TensorError, match=f"got {dtype}"):
        Codec(name).encode(x)
    with pytest.raises(TensorError, match="raw"):
        Codec(name).wire_nbytes(x.shape, dtype)
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        Codec(name).decode(torch.zeros(1, dtype=torch.uint8), x)


@pytest.mark.parametrize("name", ["raw", *QUANTIZING])
def test_wire_of_another_size_or_kind_is_refused_and_nothing_is_touched(name: str) -> None:
    x = torch.randn(4, 64)
    codec = Codec(name)
    wire = codec.encode(x)
    out = torch.full_like(x, 5.0)
    pair = torch.stack((wire, wire), dim=1)
    wrong = (wire[:-1], torch.cat((wire, wire[:1])), wire.char(), pair, pair[:, 0], wire[:0])
    for bad in wrong:
        with pytest.raises(TensorError, match=r"wire: expected .* got"):
            codec.decode(bad, out)
        with pytest.raises(TensorError, match=r"out: expected .* got"):
            codec.encode(x, bad)
    with pytest.raises(TensorError, match=f"expected {wire.numel()} bytes.*{wire.numel() - 1}"):
        codec.decode(wire[:-1], out)
    assert torch.equal(out, torch.full_like(x, 5.0))


@pytest.mark.parametrize("name", ["raw", *QUANTIZING])
def test_tensors_that_hold_no_plain_memory_are_refused(name: str) -> None:
    codec = Codec(name)
    with pytest.raises(TensorError, match="meta"):
        codec.encode(torch.empty(2, 64, device="meta"))
    with pytest.raises(TensorError, match="sparse"):
        codec.encode(torch.eye(64).to_sparse())
    with pytest.raises(TensorError, match="meta"):
        codec.decode(codec.encode(torch.ones(2, 64)), torch.empty(2, 64, device="meta"))


@pytest.mark.parametrize("name", ["raw", "int8"])
def test_arguments_that_are_no_tensors_are_refused_by_name(name: str) -> None:
    codec = Codec(name)
    x = torch.ones(2, 64)
    with pytest.raises(TensorError, match="x: expected a torch tensor; got ndarray"):
        codec.encode(x.numpy())  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="out: expected a torch tensor; got bytearray"):
        codec.encode(x, bytearray(128))  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="wire: expected a torch tensor; got NoneType"):
        codec.decode(None, x)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="out: expected a torch tensor; got list"):
        codec.decode(codec.encode(x), [1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2.5,), ("64",), 64, (None, 64), "ab"])
def test_a_shape_of_no_whole_numbers_is_refused(shape: object) -> None:
    for name in ("raw", "int8"):
        with pytest.raises(TensorError, match="whole numbers; got"):
            Codec(name).wire_nbytes(shape, torch.float32)  # type: ignore[arg-type]
        with pytest.raises(TensorError, match=r"torch\.dtype.*got 'float32'"):
            Codec(name).wire_nbytes((2, 64), "float32")  # type: ignore[arg-type]


def test_a_shape_that_cannot_be_is_refused() -> None:
    for name in ("raw", "int8"):
        for shape in ((2**63,), (2**70, 0), (2**40, 2**40)):
            with pytest.raises(TensorError, match="2\\^60"):
                Codec(name).wire_nbytes(shape, torch.float32)
    for name in ("raw", "int8"):
        with pytest.raises(TensorError, match="extents >= 0"):
            Codec(name).wire_nbytes((-1, 64), torch.float32)
    with pytest.raises(TensorError, match="2\\^60"):
        Codec("int8").wire_nbytes((2**40, 2**40), torch.float32)


@pytest.mark.parametrize("name", ["raw", *QUANTIZING])
def test_tensors_that_need_a_gradient_pass_without_entering_the_graph(name: str) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    codec = Codec(name)
    wire = codec.encode(x * 1.0)
    assert not wire.requires_grad
    out = torch.empty(4, 64, requires_grad=True)
    assert codec.decode(wire, out) is out
    assert out.requires_grad
    assert out.is_leaf
    assert torch.equal(out.detach(), round_trip(name, x.detach()))


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(QUANTIZING),
    dtype=st.sampled_from(FLOATS),
    cols=st.integers(0, 140),
    seed=st.integers(0, 2**31),
)
def test_any_bytes_of_the_right_size_decode_without_harm(
    name: str, dtype: torch.dtype, cols: int, seed: int
) -> None:
    codec = Codec(name)
    nbytes = codec.wire_nbytes((3, cols), dtype)
    wire = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed)).byte()
    room = torch.full((3 * cols + 64,), 7.0, dtype=dtype)
    out = room[32 : 32 + 3 * cols].view(3, cols)
    first = codec.decode(wire, out).clone()
    again = codec.decode(wire, torch.zeros_like(first))
    assert torch.equal(first.nan_to_num(nan=1.5), again.nan_to_num(nan=1.5))
    assert not first.isinf().any()
    assert (room[:32] == 7).all()
    assert (room[32 + 3 * cols :] == 7).all()


def test_wire_is_a_fraction_of_the_tensor_and_tiny_tensors_stay_tiny() -> None:
    shape = (2, 128, 4096)
    raw = Codec("raw").wire_nbytes(shape, torch.bfloat16)
    assert raw == math.prod(shape) * 2
    assert Codec("int8:group=128").wire_nbytes(shape, torch.bfloat16) <= 0.53 * raw
    assert Codec("int8").wire_nbytes(shape, torch.bfloat16) <= 0.53 * raw
    assert Codec("int4").wire_nbytes(shape, torch.bfloat16) == 0.3125 * raw
    for name in QUANTIZING:
        assert Codec(name).wire_nbytes((5,), torch.bfloat16) <= 10 + 64


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_decoding_into_a_tensor_that_autograd_saved_is_noticed(name: str) -> None:
    codec = Codec(name)
    leaf = torch.ones(4, 32, requires_grad=True)
    saved = leaf * 2
    loss = (saved * saved).sum()
    codec.decode(codec.encode(torch.zeros(4, 32)), saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_wire_that_lies_in_the_tensor_is_refused(name: str) -> None:
    codec = Codec(name)
    memory = torch.zeros(4 * 64 * 4, dtype=torch.uint8)
    out = memory.view(torch.float32).view(4, 64)
    nbytes = codec.wire_nbytes(out.shape, out.dtype)
    with pytest.raises(TensorError, match="memory of its own"):
        codec.decode(memory[:nbytes], out)
    with pytest.raises(TensorError, match="memory of its own"):
        codec.encode(out, out=memory[:nbytes])
