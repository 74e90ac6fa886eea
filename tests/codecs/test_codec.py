"""What codecs make of values: bytes against a plain reference, error bounds, format edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.codecs.codec import Codec
from tests.codecs.codec_reference import (
    FLOATS,
    GROUP,
    QUANTIZING,
    SPIKED,
    TRANSFORMED,
    assert_within_half_a_step,
    family,
    reference_wire,
    round_trip,
    scales_of,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*QUANTIZING, *TRANSFORMED, *SPIKED])
def test_encode_gives_the_bytes_of_the_reference(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (3, 7), (2, 129), (3, 5, 771), (5, 96), (64, 128), (200, 1)):
        x = torch.randn(shape, generator=generator)
        x = (x * torch.logspace(-3, 3, shape[-1])).to(dtype)
        wire = Codec(name).encode(x)
        assert wire.numpy().tobytes() == reference_wire(name, x)
        assert wire.numel() == Codec(name).wire_nbytes(shape, dtype)


def test_golden_bytes_do_not_change() -> None:
    x = torch.tensor([[-1.0, 0.5, 0.25, 2.0, -0.125], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert Codec("int8").encode(x).numpy().tobytes() == bytes.fromhex(
        "813c 013c 000000000000000000000000"  # scales
        "c020107ff8 000000007f"
    )
    assert Codec("int4").encode(x).numpy().tobytes() == bytes.fromhex(
        "4d3e 893d 000000000000000000000000"  # scales
        "80bf 0000 000000000000000000000000"  # zeros
        "f04706 00f000"
    )
    assert Codec("int4-symmetric").encode(x).numpy().tobytes() == bytes.fromhex(
        "923e 123e 000000000000000000000000"  # scales
        "7c0201 007000"
    )
    assert Codec("fp8").encode(x).numpy().tobytes() == bytes.fromhex(
        "923b 123b 000000000000000000000000"  # scales
        "f66e667ede 000000007e"
    )
    assert Codec("nf4").encode(x).numpy().tobytes() == bytes.fromhex(
        "0040 803f 000000000000000000000000"  # scales
        "f26a09 77f707"
    )


def test_golden_bytes_of_a_transform_and_of_noise_do_not_change() -> None:
    x = torch.arange(-32, 32, dtype=torch.float32).view(1, 64)
    wire = Codec("int4:hadamard=64").encode(x).numpy().tobytes()
    assert wire == bytes.fromhex(
        "1a3f 323f 000000000000000000000000"  # scales
        "3cc0 9cc0 000000000000000000000000"  # zeros
        "2476755b62421f33e595986051069b44 64764bb64908d7887fb86c7b47a6ae33"
    )
    wire = Codec("int8:rounding=stochastic,seed=7").encode(x / 3).numpy().tobytes()
    assert wire == bytes.fromhex(
        "ad3d 0000000000000000000000000000"  # scale
        "82868a8e9296999da1a5aaaeb1b5b9bdc1c5c9ccd0d4d9dde0e4e8ecf0f4f8fc"
        "0004080c1014181c1f24282c2f33383b3f43474b4f53565b5e63676b6e72777a"
    )


# Error


bf16_range = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*QUANTIZING, *SPIKED]),
    dtype=st.sampled_from(FLOATS),
    values=st.lists(st.one_of(bf16_range, st.floats(-4, 4, width=32)), min_size=1, max_size=70),
)
def test_error_is_at_most_half_a_step_of_the_decoded_scale(
    name: str, dtype: torch.dtype, values: list[float]
) -> None:
    x = torch.tensor([values]).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    assert_within_half_a_step(name, x)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from([*QUANTIZING, *SPIKED]),
    centre=st.floats(-1e6, 1e6, width=32),
    spread=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]),
    seed=st.integers(0, 2**31),
)
def test_error_bound_holds_for_values_close_together(
    name: str, centre: float, spread: float, seed: int
) -> None:
    noise = torch.rand(2, 70, generator=torch.Generator().manual_seed(seed))
    assert_within_half_a_step(name, centre * (1 + spread * noise))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / x.double().norm()).item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8:group=32", 0.0054),
        ("int8", 0.0060),
        ("int8:group=128", 0.0065),
        ("int8:hadamard=64", 0.0060),
        ("int4", 0.078),
        ("int4:hadamard=64", 0.078),
        ("int4-symmetric", 0.108),
        ("fp8", 0.026),
        ("nf4", 0.092),
    ],
)
def test_error_on_normal_values_is_the_known_one(name: str, expected: float) -> None:
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    assert relative_error(x, round_trip(name, x)) == pytest.approx(expected, rel=0.05)


def test_nf4_error_is_the_published_one() -> None:
    # bitsandbytes, tests/test_functional.py: mean |x - y| for N(0, 1) in blocks of 64.
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    error = (x - round_trip("nf4", x)).abs().mean().item()
    assert error == pytest.approx(0.072798, abs=7 * 7.4e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["int8", "int8:group=32", "int8:group=128", "int4-symmetric"])
def test_symmetric_integers_a_second_trip_changes_nothing(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-4, 4, 300)[:, None]).to(dtype)
    codec = Codec(name)
    wire = codec.encode(x)
    assert torch.equal(codec.encode(codec.decode(wire, torch.empty_like(x))), wire)


@pytest.mark.parametrize("name", ["int8", "int4-symmetric", "fp8"])
def test_symmetric_codecs_mirror_and_keep_the_largest_value(name: str) -> None:
    x = torch.randn(65536, generator=torch.Generator().manual_seed(2))
    decoded = round_trip(name, x)
    assert torch.equal(round_trip(name, -x), -decoded)
    largest = x.view(-1, 64).abs().max(dim=1)
    kept = decoded.view(-1, 64).gather(1, largest.indices[:, None]).abs().squeeze()
    torch.testing.assert_close(kept, largest.values, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", [*QUANTIZING[:6], "int4:hadamard=64"])
def test_mean_error_is_far_below_a_step(name: str) -> None:
    x = torch.randn(65536, generator=torch.Generator().manual_seed(3)).view(-1, 128)
    codec = Codec(name)
    wire = codec.encode(x)
    step = scales_of(wire, 65536 // GROUP[name]).mean().item()
    error = codec.decode(wire, torch.empty_like(x)).double() - x.double()
    # The steps of fp8 grow with the value, up to 32 scales.
    assert abs(error.mean().item()) < 0.01 * step * (32 if name == "fp8" else 1)


# Edges of the formats


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*QUANTIZING, *TRANSFORMED, *SPIKED])
def test_zero_groups_decode_to_positive_zero(name: str, dtype: torch.dtype) -> None:
    x = torch.zeros(256, 256, dtype=dtype)
    x[17, 70] = 1.0
    x[100] = -0.0
    decoded = round_trip(name, x)
    assert decoded[17, 70].item() == pytest.approx(1.0, rel=0.1 if name in TRANSFORMED else 2**-7)
    # A transform spreads the error of the one over its block.
    near = slice(64, 128) if name in TRANSFORMED else 70
    decoded[17, near] = 0.0
    assert torch.equal(decoded, torch.zeros_like(x))
    assert not decoded.signbit().any()
    zeros = torch.zeros(2, 70, dtype=dtype)
    assert torch.equal(Codec(name).encode(-zeros), Codec(name).encode(zeros))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*QUANTIZING, *TRANSFORMED])
def test_a_non_finite_value_makes_its_group_nan_and_no_other(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    x = torch.randn(4, 250, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = round_trip(name, x)
    for row, col in ((1, 70), (3, 249)):
        x[row, col] = bad
        # A whole block of 64 where it is transformed, which the row's last 58 values are not.
        size = 64 if name in TRANSFORMED and col < 192 else GROUP[name]
        expected[row, col // size * size : col // size * size + size] = math.nan
    torch.testing.assert_close(round_trip(name, x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*QUANTIZING, *TRANSFORMED, *SPIKED])
@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (torch.float16, 65504.0),
        (torch.bfloat16, 3.3895313892515355e38),
        (torch.bfloat16, 3e38),
        (torch.float32, 3.4028234663852886e38),
    ],
)
def test_the_largest_values_stay_finite(name: str, dtype: torch.dtype, top: float) -> None:
    for values in ([top, -top, 1.0, 0.0], [top] * 40, [-top] * 40, [top, 1.0, -1.0] * 30):
        x = torch.tensor([values], dtype=torch.float64).to(dtype)
        decoded = round_trip(name, x)
        assert decoded.isfinite().all()
        step = top * {"int8": 1 / 127, "int4": 2 / 15, "fp8": 1 / 14}.get(family(name), 0.3)
        # Errors of a block add up at worst; none reaches the sum of all.
        step *= 4 if name in TRANSFORMED else 1
        assert (decoded.double() - x.double()).abs().max().item() <= step


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", [*QUANTIZING, *SPIKED])
def test_subnormal_values_cost_at_most_a_step(name: str, flush: bool) -> None:
    tiny16 = (torch.arange(1000, dtype=torch.float64) * 2**-24).to(torch.float16)
    tiny32 = torch.arange(-100, 100, dtype=torch.float64).mul(1e-40).to(torch.float32)
    plain = [Codec(name).encode(x) for x in (tiny16, tiny32)]
    try:
        torch.set_flush_denormal(flush)
        for x, wire in zip((tiny16, tiny32), plain, strict=True):
            assert torch.equal(Codec(name).encode(x), wire)
            y = x
            for _ in range(5):
                y = round_trip(name, y)
                assert y.isfinite().all()
    finally:
        torch.set_flush_denormal(False)
    assert_within_half_a_step(name, tiny16[None])
    assert_within_half_a_step(name, tiny32[None])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groups_of_one_value_decode_close_to_it(dtype: torch.dtype) -> None:
    for value in (1.0, -3.14159, 1e-30, 12345.678, -6e4):
        x = torch.full((2, 45), value).to(dtype)
        torch.testing.assert_close(round_trip("int4", x), x, rtol=2**-12, atol=0)
        for name in ("int8", "int4-symmetric", "fp8", "nf4"):
            torch.testing.assert_close(round_trip(name, x), x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", [*QUANTIZING, *SPIKED])
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (3, 7), (2, 129), (3, 5, 771), (2, 63), (2, 65), (5, 31), (4, 33)]
)
def test_tails_keep_their_own_bound_and_repeat(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    codec = Codec(name)
    wires = [codec.encode(x, torch.full((codec.wire_nbytes(shape, x.dtype),), 255).byte())]
    wires += [codec.encode(x) for _ in range(20)]
    assert all(torch.equal(wire, wires[0]) for wire in wires)
    decoded = codec.decode(wires[0], torch.full(shape, math.nan))
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    if x.dim() > 0:
        assert_within_half_a_step(name, x)
    else:
        assert decoded.item() == pytest.approx(x.item(), rel=0.01)


@pytest.mark.parametrize("name", ["raw", *QUANTIZING, *TRANSFORMED, *SPIKED])
@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 5)])
def test_no_elements_take_no_bytes(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert Codec(name).encode(x).shape == (0,)
    assert round_trip(name, x).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codec_covers_floats_from_a_size_on(dtype: torch.dtype) -> None:
    codec, tensor = Codec("int4"), torch.zeros(100, dtype=dtype)
    assert codec.covers(tensor, min_nbytes=0)
    assert codec.covers(tensor, min_nbytes=tensor.nbytes)
    assert not codec.covers(tensor, min_nbytes=tensor.nbytes + 1)
    assert not Codec("raw").covers(tensor, min_nbytes=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
def test_codec_does_not_cover_other_dtypes(dtype: torch.dtype) -> None:
    assert not Codec("int4").covers(torch.zeros(100, dtype=dtype), min_nbytes=0)
