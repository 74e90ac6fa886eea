"""Options of a codec: the Hadamard transform, stochastic rounding, group sizes."""

from __future__ import annotations

import itertools
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
    QUANTIZING,
    TRANSFORMED,
    butterflies,
    family,
    groups_of,
    half_step,
    round_trip,
    scales_of,
    transformed,
)

STOCHASTIC = (
    "int8:rounding=stochastic",
    "int8:group=128,rounding=stochastic",
    "int4:rounding=stochastic",
    "int4-symmetric:rounding=stochastic",
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / x.double().norm()).item()


# The transform


def rotated(x: torch.Tensor) -> torch.Tensor:
    rows = [torch.from_numpy(transformed(row.numpy())) for row in x]
    return torch.stack(rows)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_error_in_the_rotated_space_is_at_most_half_a_step(name: str) -> None:
    x = randn(40, 192) * torch.logspace(-6, 6, 40)[:, None]
    wire = Codec(name).encode(x)
    decoded = Codec(name).decode(wire, torch.empty_like(x))
    groups, back = (groups_of(rotated(t), GROUP[name]) for t in (x, decoded))
    errors = [(a.double() - b.double()).abs() for a, b in zip(groups, back, strict=True)]
    scales = scales_of(wire, len(groups))
    for group, error, scale in zip(groups, errors, scales, strict=True):
        assert (error <= half_step(name, scale, group) * 1.001).all()
    # The transform keeps lengths, but for the factor of 8.
    total = torch.cat(errors).norm().item() * 8
    assert (x.double() - decoded.double()).norm().item() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_values_behind_the_last_whole_block_are_not_transformed(name: str) -> None:
    x = randn(6, 63)
    wire = Codec(name).encode(x)
    assert torch.equal(wire, Codec(name.replace("hadamard=64", "")[:-1]).encode(x))
    wide = torch.cat((randn(6, 128, seed=1), x), dim=1)
    plain = round_trip(name.replace("hadamard=64", "")[:-1], wide)
    assert torch.equal(round_trip(name, wide)[:, 128:], plain[:, 128:])
    assert not torch.equal(round_trip(name, wide)[:, :128], plain[:, :128])


def test_butterflies_of_the_reference_are_a_walsh_hadamard_matrix() -> None:
    matrix = torch.stack([torch.from_numpy(butterflies(row.numpy())) for row in torch.eye(64)])
    assert torch.equal(matrix @ matrix, 64 * torch.eye(64))
    assert torch.equal(matrix.abs(), torch.ones(64, 64))


def outliers() -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values with two channels a hundred times larger; True for the other channels."""
    x = randn(64, 768)
    x[:, [5, 300]] *= 100
    others = torch.ones(768, dtype=torch.bool)
    others[[5, 300]] = False
    return x, others


# Without the transform the neighbours of an outlier are lost; with it the loss is spread.
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("int8:hadamard=64", 0.02),
        ("int8:group=32,hadamard=64", 0.02),
        ("int4:hadamard=64", 0.30),
    ],
)
def test_outlier_channels_cost_their_neighbours_little(name: str, bound: float) -> None:
    x, others = outliers()
    decoded = round_trip(name, x)
    assert relative_error(x[:, others], decoded[:, others]) <= bound
    assert relative_error(x[:, ~others], decoded[:, ~others]) <= 0.02
    plain = round_trip(name.replace(",hadamard=64", "").replace(":hadamard=64", ""), x)
    assert relative_error(x, decoded) < relative_error(x, plain)


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 1e-37])
def test_tiny_values_under_a_transform_cost_at_most_a_step(name: str, size: float) -> None:
    x = (randn(4, 128) * size).to(torch.float32)
    decoded = round_trip(name, x)
    assert decoded.isfinite().all()
    # The smallest scale is 2^-126; 64 errors of half of it add up in the worst case.
    assert (decoded - x).abs().max().item() <= 2.0**-121 + 0.6 * x.abs().max().item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_that_a_transform_meets_only_in_broken_bytes_give_nan_or_finite(
    dtype: torch.dtype,
) -> None:
    for name in TRANSFORMED:
        codec = Codec(name)
        out = torch.empty(4, 128, dtype=dtype)
        wire = torch.full((codec.wire_nbytes(out.shape, dtype),), 0x7F, dtype=torch.uint8)
        assert not codec.decode(wire, out).isinf().any()


# Stochastic rounding


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_unbiased_for_every_element(name: str) -> None:
    num_draws = 1024
    x = randn(2, 150, seed=1)
    codec = Codec(name)
    draws = torch.stack([round_trip(name, x, seed=seed) for seed in range(num_draws)]).double()
    wire = codec.encode(x)
    size = GROUP.get(name, 128 if "128" in name else GROUP[family(name)])
    groups = groups_of(x, size)
    steps = torch.cat(
        [
            scale.expand(group.numel())
            for group, scale in zip(groups, scales_of(wire, len(groups)), strict=True)
        ]
    ).view_as(x)
    # Single draws are within a step; their mean is five deviations from x at most.
    assert ((draws - x).abs() <= steps * 1.0001).all()
    assert ((draws.mean(0) - x).abs() <= 5 * steps / (2 * math.sqrt(num_draws))).all()
    nearest = round_trip(name.replace("rounding=stochastic", "rounding=nearest"), x)
    assert not torch.equal(draws[0], nearest.double())


@pytest.mark.parametrize("name", STOCHASTIC)
def test_neighbours_are_rounded_independently(name: str) -> None:
    x = torch.full((1, 128), 0.3)
    x[:, ::32] = 1.0
    errors = torch.stack([round_trip(name, x, seed=seed)[0] - x[0] for seed in range(2000)])
    free = errors[:, errors.std(0) > 0][:, :24].double()
    assert free.shape[1] == 24
    correlation = torch.corrcoef(free.T) - torch.eye(24)
    assert correlation.abs().max().item() < 5 / math.sqrt(2000)


def test_values_on_the_grid_do_not_move() -> None:
    steps = torch.arange(-127, 128, dtype=torch.float32)
    for scale in (1.0, 0.0123291015625, 3 * 2.0**40):
        x = torch.cat((steps[64:191], torch.tensor([127.0]))).view(1, 128) * scale
        for seed in range(200):
            name = f"int8:group=128,rounding=stochastic,seed={seed}"
            assert torch.equal(round_trip(name, x), x)
    grid = torch.arange(0, 32, dtype=torch.float32).remainder(16).view(1, 32) * 0.75 - 2
    for seed in range(200):
        assert torch.equal(round_trip("int4:rounding=stochastic", grid, seed=seed), grid)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(STOCHASTIC),
    dtype=st.sampled_from(FLOATS),
    exponent=st.integers(-40, 36),
    seed=st.integers(0, 2**64 - 1),
)
def test_noise_moves_no_value_out_of_its_groups_range(
    name: str, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    top = torch.finfo(dtype).max
    x = (randn(2, 70) * 10.0**exponent).clamp(-top, top).to(dtype)
    decoded = round_trip(name, x, seed=seed)
    assert decoded.isfinite().all()
    largest = x.abs().max().double() * (1 + 2**-7) + 2.0**-119
    assert decoded.abs().max().double() <= largest * (1.07 if family(name) == "int4" else 1)


def test_a_seed_takes_the_place_of_the_codecs_own() -> None:
    x = randn(3, 200)
    plain = Codec("int8:rounding=stochastic")
    seven = Codec("int8:rounding=stochastic,seed=7")
    assert torch.equal(plain.encode(x, seed=7), seven.encode(x))
    assert torch.equal(seven.encode(x, seed=0), plain.encode(x))
    assert not torch.equal(plain.encode(x), seven.encode(x))
    assert torch.equal(Codec("int8").encode(x, seed=7), Codec("int8").encode(x))
    assert plain.decode(seven.encode(x), torch.empty_like(x)).isfinite().all()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True])
def test_a_seed_that_is_no_64_bit_number_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed from 0"):
        Codec("int8:rounding=stochastic").encode(torch.ones(4), seed=seed)  # type: ignore[arg-type]


# Group sizes and wire size


def test_error_grows_slowly_with_the_group() -> None:
    x = randn(262144).view(64, 4096)
    for codec, sizes in (("int8", (32, 64, 128)), ("fp8", (32, 64, 128))):
        errors = [relative_error(x, round_trip(f"{codec}:group={size}", x)) for size in sizes]
        for small, large in itertools.pairwise(errors):
            assert large < 1.2 * small
    for size in (16, 256, 512, 4096):
        with pytest.raises(ConfigError, match="got"):
            Codec(f"int8:group={size}")


def test_four_bit_codecs_reach_the_size_they_are_for() -> None:
    shape = (2, 128, 4096)
    raw = Codec("raw").wire_nbytes(shape, torch.bfloat16)
    for name in ("int4-symmetric", "nf4", "int4-symmetric:hadamard=64"):
        assert Codec(name).wire_nbytes(shape, torch.bfloat16) <= 0.28 * raw
        assert Codec(name).wire_nbytes((5,), torch.bfloat16) <= 10 + 64


@pytest.mark.parametrize("name", [*QUANTIZING, *TRANSFORMED])
def test_the_name_of_a_codec_names_it(name: str) -> None:
    assert Codec(Codec(name).name) == Codec(name)
    assert Codec(name).name == name
