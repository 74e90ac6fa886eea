"""The codecs once more, in plain numpy one group at a time, and the error bounds they promise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pipecomm.codecs.codec import Codec

QUANTIZING = (
    "int8",
    "int8:group=32",
    "int8:group=128",
    "int4",
    "int4-symmetric",
    "fp8",
    "nf4",
)
TRANSFORMED = (
    "int8:hadamard=64",
    "int8:group=32,hadamard=64",
    "int4:hadamard=64",
    "int4-symmetric:hadamard=64",
    "fp8:hadamard=64",
    "nf4:hadamard=64",
)
SPIKED = (
    "int8:spikes=1",
    "int8:group=128,spikes=4",
    "int4:spikes=1",
    "int4:spikes=4",
    "int4-symmetric:spikes=2",
    "fp8:group=32,spikes=2",
    "nf4:spikes=1",
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TRANSFORM_WIDTH = 64
# The first 64 bits of pi behind the point; bit i turns value i around.
SIGNS = np.array([1 - 2 * (0x243F6A8885A308D3 >> i & 1) for i in range(64)], np.float32)
# QLoRA (arXiv 2305.14314), appendix E.
NF4_LEVELS = np.fromstring(
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1.0",
    np.float32,
    sep=" ",
)


def family(name: str) -> str:
    return name.split(":")[0]


def option(name: str, key: str, default: int) -> int:
    options = dict(option.split("=") for option in name.partition(":")[2].split(",") if option)
    return int(options.get(key, default))


def group_size(name: str) -> int:
    return option(name, "group", 32 if family(name) == "int4" else 64)


def num_spikes(name: str) -> int:
    return option(name, "spikes", 0)


GROUP = {name: group_size(name) for name in (*QUANTIZING, *TRANSFORMED, *SPIKED)}


def round_trip(name: str, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    codec = Codec(name)
    return codec.decode(codec.encode(x, seed=seed), torch.empty_like(x))


# A reference in plain numpy, one group at a time: scale, zero and code bytes.

Coded = tuple[int, int, bytes]


def bf16_bits(values: np.ndarray, direction: str) -> np.ndarray:
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    if direction == "nearest":
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    away = (bits >> 31 == 1) if direction == "down" else (bits >> 31 == 0)
    return np.where(away, (bits + 0xFFFF) >> 16, bits >> 16).astype(np.uint16)


def bf16_value(bits: int) -> np.float32:
    return np.array([int(bits) << 16], np.uint32).view(np.float32)[0]


def packed(codes: np.ndarray) -> bytes:
    codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8)).astype(np.uint8)
    return (codes[: len(codes) // 2] | codes[len(codes) // 2 :] << 4).tobytes()


def scaled(group: np.ndarray, top: float) -> tuple[int, np.ndarray]:
    """The scale that takes the largest magnitude to ``top``, and the group in scales."""
    quotient = np.abs(group).max(keepdims=True) / np.float32(top)
    scale = int(bf16_bits(quotient, "nearest")[0])
    inverse = np.float32(1) / bf16_value(scale) if scale else np.float32(0)
    return scale, group * inverse


def reference_int8(group: np.ndarray) -> Coded:
    scale, steps = scaled(group, 127)
    return scale, 0, np.rint(steps).astype(np.int8).tobytes()


def reference_int4_symmetric(group: np.ndarray) -> Coded:
    scale, steps = scaled(group, 7)
    return scale, 0, packed(np.rint(steps).astype(np.int8).view(np.uint8) & 15)


def reference_fp8(group: np.ndarray) -> Coded:
    scale, steps = scaled(group, 448)
    codes = torch.from_numpy(steps).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return scale, 0, np.where(codes == 0x80, 0, codes).astype(np.uint8).tobytes()


def reference_nf4(group: np.ndarray) -> Coded:
    scale, steps = scaled(group, 1)
    bounds = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) * np.float32(0.5)
    return scale, 0, packed(np.searchsorted(bounds, steps, side="left").astype(np.uint8))


def reference_int4(group: np.ndarray) -> Coded:
    zero = int(bf16_bits(group.min(keepdims=True), "down")[0])
    half, halves = np.float32(0.5) * bf16_value(zero), np.float32(0.5) * group
    spread = halves.max() - half
    step = np.array([spread / np.float32(7.5)], np.float32)
    scale = int(bf16_bits(step, "up")[0]) if spread > 0 else 0
    inverse = np.float32(2) / bf16_value(scale) if scale else np.float32(0)
    return scale, zero, packed(np.rint((halves - half) * inverse).astype(np.uint8))


REFERENCES: dict[str, Callable[[np.ndarray], Coded]] = {
    "int8": reference_int8,
    "int4": reference_int4,
    "int4-symmetric": reference_int4_symmetric,
    "fp8": reference_fp8,
    "nf4": reference_nf4,
}


def butterflies(block: np.ndarray) -> np.ndarray:
    block = block.copy()
    for distance in (1, 2, 4, 8, 16, 32):
        pairs = block.reshape(-1, 2, distance)
        low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0], pairs[:, 1] = low + high, low - high
    return block


def transformed(row: np.ndarray) -> np.ndarray:
    """Whole blocks of the row in the encoder's rotated space; the rest as it is."""
    row = row.copy()
    for i in range(0, len(row) - TRANSFORM_WIDTH + 1, TRANSFORM_WIDTH):
        block = row[i : i + TRANSFORM_WIDTH]
        row[i : i + TRANSFORM_WIDTH] = butterflies(block * SIGNS * np.float32(2.0**-6))
    return row


def without_spikes(name: str, group: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
    """What is left of a group, and the bf16 bits and places of its spikes."""
    left, values, places = group.copy(), [], []
    stand_in = group[np.abs(group).argmin()] if family(name) == "int4" else np.float32(0)
    for _ in range(num_spikes(name)):
        place = int(np.abs(left).argmax())
        values.append(int(bf16_bits(left[place : place + 1], "nearest")[0]))
        places.append(place)
        left[place] = stand_in
    return left, values, places


def reference_wire(name: str, x: torch.Tensor) -> bytes:
    """The wire bytes of a tensor of normal, finite numbers."""
    rows = x.float().reshape(-1, x.shape[-1]).numpy()
    if "hadamard" in name:
        rows = np.stack([transformed(row) for row in rows])
    size = GROUP[name]
    one = REFERENCES[family(name)]
    parts = [without_spikes(name, r[i : i + size]) for r in rows for i in range(0, len(r), size)]
    groups = [one(left) for left, _, _ in parts]

    def section(values: list[int], dtype: type = np.uint16) -> bytes:
        raw = np.array(values, dtype).tobytes()
        return raw + bytes(-len(raw) % 16)

    spikes = section([value for _, values, _ in parts for value in values])
    spikes += section([place for _, _, places in parts for place in places], np.uint8)

    zeros = section([zero for _, zero, _ in groups]) if family(name) == "int4" else b""
    sections = section([scale for scale, _, _ in groups]) + zeros + spikes
    return sections + b"".join(codes for _, _, codes in groups)


# Error bounds


def groups_of(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [g for row in x.reshape(-1, x.shape[-1]) for g in row.split(size)]


def scales_of(wire: torch.Tensor, num_groups: int) -> torch.Tensor:
    return wire[: 2 * num_groups].view(torch.bfloat16).double()


def half_step(name: str, scale: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The largest error of rounding to a code, by the scale on the wire."""
    # No scale is below the smallest normal number: groups up to half of it become zeros.
    scale = scale.clamp(min=2.0**-126)
    if family(name) == "fp8":
        return torch.maximum(scale * 2.0**-10, group.double().abs() * 2.0**-4)
    if family(name) == "nf4":
        return scale * float(NF4_LEVELS[1] - NF4_LEVELS[0]) / 2
    return scale / 2


def spike_error(name: str, group: torch.Tensor) -> torch.Tensor:
    """The largest error of those that may be spikes, kept as bf16; 0 for other values."""
    magnitude = group.double().abs()
    if num_spikes(name) == 0:
        return torch.zeros_like(magnitude)
    least = magnitude.topk(min(num_spikes(name), group.numel())).values.min()
    return torch.where(magnitude >= least, magnitude * 2.0**-8 + 2.0**-134, 0.0)


def assert_within_half_a_step(name: str, x: torch.Tensor) -> None:
    codec = Codec(name)
    wire = codec.encode(x)
    decoded = codec.decode(wire, torch.empty_like(x))
    groups, back = groups_of(x, GROUP[name]), groups_of(decoded, GROUP[name])
    for group, got, scale in zip(groups, back, scales_of(wire, len(groups)), strict=True):
        error = (group.double() - got.double()).abs()
        # The quotient is rounded, and so is the result to the output's dtype.
        quotient = group.double().abs() * 2.0**-22 + scale * 2.0**-17 * (family(name) == "int4")
        output = got.double().abs().clamp(min=torch.finfo(x.dtype).tiny) * EPS[x.dtype]
        bound = half_step(name, scale, group) + quotient + output
        bound = torch.maximum(bound, spike_error(name, group))
        assert (error <= bound).all(), (group, got, scale)
