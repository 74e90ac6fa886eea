"""Spikes: the largest values of a group, kept beside its codes and out of its scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomm.codecs.codec import Codec
from pipecomm.errors import ConfigError
from tests.codecs.codec_reference import (
    FLOATS,
    GROUP,
    SPIKED,
    family,
    num_spikes,
    round_trip,
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / x.double().norm()).item()


def plain_name(name: str) -> str:
    """The codec without its spikes."""
    kept = [o for o in name.partition(":")[2].split(",") if not o.startswith("spikes")]
    return family(name) + (":" + ",".join(kept) if kept else "")


def spike_sections(name: str, wire: torch.Tensor, num_groups: int) -> tuple[slice, slice]:
    """Where the values and the places of the spikes lie."""

    def padded(nbytes: int) -> int:
        return (nbytes + 15) // 16 * 16

    begin = padded(2 * num_groups) * (2 if family(name) == "int4" else 1)
    count = num_groups * num_spikes(name)
    places = begin + padded(2 * count)
    return slice(begin, begin + 2 * count), slice(places, places + count)


# Bytes


def test_golden_bytes_of_spikes_do_not_change() -> None:
    x = torch.tensor([[-1.0, 0.5, 0.25, 2.0, -0.125], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert Codec("int4:spikes=1").encode(x).numpy().tobytes() == bytes.fromhex(
        "cd3d 0000 000000000000000000000000"  # scales
        "80bf 0000 000000000000000000000000"  # zeros
        "0040 803f 000000000000000000000000"  # spikes
        "03 04 0000000000000000000000000000"  # their places
        "909f0c 000000"
    )
    assert Codec("int8:spikes=2").encode(x).numpy().tobytes() == bytes.fromhex(
        "813b 0000 000000000000000000000000"  # scale
        "0040 80bf 803f 0000 0000000000000000"  # spikes
        "03 00 04 00 000000000000000000000000"  # their places
        "007f4000e0 0000000000"
    )


def test_the_first_of_equal_magnitudes_is_the_spike() -> None:
    x = torch.full((1, 64), 0.5)
    x[0, 40] = -3.0
    x[0, 50] = 3.0
    wire = Codec("nf4:spikes=1").encode(x)
    values, places = spike_sections("nf4:spikes=1", wire, 1)
    assert wire[values].view(torch.bfloat16).item() == -3.0
    assert wire[places].item() == 40


# Error


def outlier_channels() -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values with two channels a hundred times larger; True for the other channels."""
    x = randn(64, 768)
    x[:, [5, 300]] *= 100
    others = torch.ones(768, dtype=torch.bool)
    others[[5, 300]] = False
    return x, others


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("int4:spikes=1", 0.07),
        ("int4-symmetric:spikes=1", 0.10),
        ("nf4:spikes=1", 0.09),
        ("int8:spikes=1", 0.006),
        ("fp8:spikes=1", 0.025),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_outlier_channels_do_not_cost_their_neighbours(
    name: str, bound: float, dtype: torch.dtype
) -> None:
    x, others = outlier_channels()
    decoded = round_trip(name, x.to(dtype))
    assert relative_error(x.to(dtype)[:, others], decoded[:, others]) <= bound
    assert relative_error(x[:, ~others], decoded[:, ~others]) <= 0.004
    plain = round_trip(plain_name(name), x.to(dtype))
    assert relative_error(x[:, others], decoded[:, others]) < relative_error(
        x[:, others], plain[:, others]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4:spikes=1", 0.0667),
        ("int4:spikes=2", 0.0592),
        ("int4-symmetric:spikes=1", 0.092),
        ("int4-symmetric:spikes=4", 0.072),
        ("nf4:spikes=1", 0.086),
        ("int8:spikes=1", 0.0051),
    ],
)
def test_error_on_normal_values_is_the_known_one(name: str, expected: float) -> None:
    x = randn(4096, 256)
    assert relative_error(x, round_trip(name, x)) == pytest.approx(expected, rel=0.03)


# Values far from zero must not be stretched down to it by what stands in for a spike.
@pytest.mark.parametrize("spikes", [1, 2, 4])
def test_groups_far_from_zero_keep_the_small_error_of_a_zero_point(spikes: int) -> None:
    x = 20 + randn(64, 320)
    for sign in (1, -1):
        error = relative_error(sign * x, round_trip(f"int4:spikes={spikes}", sign * x))
        assert error < relative_error(sign * x, round_trip("int4", sign * x))


@pytest.mark.parametrize("name", [name for name in SPIKED if family(name).startswith("int8")])
def test_a_tensor_turned_around_decodes_to_the_values_turned_around(name: str) -> None:
    x = randn(7, 300)
    assert torch.equal(round_trip(name, -x), -round_trip(name, x))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SPIKED),
    dtype=st.sampled_from(FLOATS),
    cols=st.integers(1, 140),
    seed=st.integers(0, 2**31),
)
def test_the_largest_values_arrive_as_bfloat16(
    name: str, dtype: torch.dtype, cols: int, seed: int
) -> None:
    x = randn(3, cols, seed=seed).to(dtype)
    decoded = round_trip(name, x)
    for row, got in zip(x, decoded, strict=True):
        for group, back in zip(row.split(GROUP[name]), got.split(GROUP[name]), strict=True):
            # The last may have a twin that is no spike; in short groups what stands in is one.
            kept = group.abs().float().topk(min(num_spikes(name), group.numel()))
            if group.numel() <= num_spikes(name):
                continue
            if kept.values.unique().numel() < kept.values.numel():
                continue
            if (group.abs() == kept.values[-1]).sum() == 1:
                expected = group[kept.indices].bfloat16().to(dtype)
                assert torch.equal(back[kept.indices], expected)


# What is not finite, and the largest and smallest numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SPIKED)
def test_as_many_non_finite_values_as_spikes_are_kept_and_harm_no_other(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    x = randn(4, 250, seed=4).to(dtype)
    plain = round_trip(plain_name(name), x)
    expected = round_trip(name, x)
    spots = [(1, 70 + 3 * i) for i in range(num_spikes(name))] + [(3, 249)]
    for row, col in spots:
        x[row, col] = bad
    decoded = round_trip(name, x)
    assert [decoded[row, col].item() for row, col in spots] == pytest.approx(
        [bad] * len(spots), nan_ok=True
    )
    near = torch.zeros(4, 250, dtype=torch.bool)
    for row, col in spots:
        begin = col // GROUP[name] * GROUP[name]
        near[row, begin : begin + GROUP[name]] = True
    torch.testing.assert_close(decoded[~near], expected[~near], rtol=0, atol=0)
    ours = near & x.isfinite()
    assert decoded[ours].isfinite().all()
    # The others of the group have the error of a codec without spikes at most, and their sign.
    scale = (plain - x)[ours].abs().max() + 0.5
    assert ((decoded - x)[ours].abs() <= scale).all()
    assert (decoded[ours] * x[ours] >= -0.1).all()


@pytest.mark.parametrize("name", SPIKED)
def test_more_non_finite_values_than_spikes_make_the_rest_of_the_group_nan(name: str) -> None:
    x = randn(2, 256, seed=5)
    size, spikes = GROUP[name], num_spikes(name)
    expected = round_trip(name, x)
    x[1, 3 : 4 + spikes] = -math.inf
    expected[1, :size] = math.nan
    expected[1, 3 : 3 + spikes] = -math.inf
    torch.testing.assert_close(round_trip(name, x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_lone_value_that_is_not_finite_arrives(value: float) -> None:
    for name in SPIKED:
        decoded = round_trip(name, torch.tensor([value]))
        torch.testing.assert_close(decoded, torch.tensor([value]), equal_nan=True)


@pytest.mark.parametrize("name", SPIKED)
def test_no_finite_spike_becomes_infinite(name: str) -> None:
    for dtype in FLOATS:
        top = torch.finfo(dtype).max
        x = torch.zeros(2, 64, dtype=dtype)
        x[0, 5], x[1, 7] = top, -top
        decoded = round_trip(name, x)
        assert decoded.isfinite().all()
        assert torch.equal(decoded != 0, x != 0)
        torch.testing.assert_close(decoded, x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", SPIKED)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_groups_with_fewer_values_than_spikes_arrive_as_bfloat16(name: str, length: int) -> None:
    x = randn(6, length)
    x[0] = 0.0
    x[1, :1] = 0.0
    x[2, 1:] = 0.0
    decoded = round_trip(name, x)
    # All but one are spikes; the one left alone has its own scale.
    few = length <= num_spikes(name) + 1 and family(name) != "nf4"
    torch.testing.assert_close(decoded, x, rtol=2**-7, atol=0 if few else 0.2)
    # Where there is a zero, the smallest value may be it.
    if length <= num_spikes(name) and family(name) != "int4":
        assert torch.equal(decoded, x.bfloat16().float())


# Bytes that encode never makes


@pytest.mark.parametrize("name", SPIKED)
def test_a_place_behind_the_group_is_no_place(name: str) -> None:
    x = randn(4, 200)
    num_groups = 4 * math.ceil(200 / GROUP[name])
    codec = Codec(name)
    wire = codec.encode(x)
    decoded = codec.decode(wire, torch.empty_like(x))
    _, places = spike_sections(name, wire, num_groups)
    for far in (GROUP[name], 200, 255):
        wire[places] = far
        room = torch.full((3, 4, 200), 7.0)
        changed = codec.decode(wire, room[1])
        # Only the spikes themselves are gone: their places hold what stood in for them.
        assert changed.isfinite().all()
        assert (changed != decoded).sum() <= num_groups * num_spikes(name)
        assert (changed != decoded).any()
        assert (room[[0, 2]] == 7).all()


def test_the_first_of_two_spikes_for_one_place_counts() -> None:
    codec = Codec("int8:spikes=4")
    wire = codec.encode(randn(1, 64))
    values, places = spike_sections("int8:spikes=4", wire, 1)
    wire[values] = torch.tensor([5.0, 6.0, 7.0, 8.0]).bfloat16().view(torch.uint8)
    wire[places] = torch.tensor([9, 30, 9, 30], dtype=torch.uint8)
    decoded = codec.decode(wire, torch.empty(1, 64))
    assert decoded[0, [9, 30]].tolist() == [5.0, 6.0]
    assert decoded.abs().max() == 6.0


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(SPIKED),
    dtype=st.sampled_from(FLOATS),
    cols=st.integers(0, 140),
    seed=st.integers(0, 2**31),
)
def test_any_bytes_decode_without_harm_and_infinities_are_spikes(
    name: str, dtype: torch.dtype, cols: int, seed: int
) -> None:
    codec = Codec(name)
    nbytes = codec.wire_nbytes((3, cols), dtype)
    wire = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed)).byte()
    room = torch.full((3 * cols + 64,), 7.0, dtype=dtype)
    decoded = codec.decode(wire, room[32 : 32 + 3 * cols].view(3, cols))
    num_groups = 3 * math.ceil(cols / GROUP[name])
    values, _ = spike_sections(name, wire, num_groups)
    num_infinite = wire[values].view(torch.bfloat16).isinf().sum()
    assert decoded.isinf().sum() <= num_infinite
    assert (room[:32] == 7).all()
    assert (room[32 + 3 * cols :] == 7).all()


# Names


def test_spikes_and_a_transform_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"spikes=1\|2\|4 or, .* hadamard=64, not both"):
        Codec("int4:hadamard=64,spikes=1")


@pytest.mark.parametrize("spikes", ["0", "3", "8", "-1", "1.0", ""])
def test_other_numbers_of_spikes_are_refused(spikes: str) -> None:
    with pytest.raises(ConfigError, match=f'got "int8:spikes={spikes}"'):
        Codec(f"int8:spikes={spikes}")


@pytest.mark.parametrize("name", SPIKED)
def test_spikes_take_24_bits_each(name: str) -> None:
    shape = (8, 4096)
    extra = Codec(name).wire_nbytes(shape, torch.float32)
    extra -= Codec(plain_name(name)).wire_nbytes(shape, torch.float32)
    assert extra == 8 * 4096 // GROUP[name] * num_spikes(name) * 3
    assert Codec(Codec(name).name).name == name
