"""The codecs once more, in plain numpy one group at a time, and the error bound they promise."""

from __future__ import annotations

import numpy as np
import torch

from pipecomm.codec import Codec

QUANTIZING = ("int8", "int8:group=32", "int8:group=128", "int4")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GROUP = {"int8": 64, "int8:group=32": 32, "int8:group=128": 128, "int4": 32}
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def round_trip(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = Codec(name)
    return codec.decode(codec.encode(x), torch.empty_like(x))


# A reference in plain numpy, one group at a time.


def bf16_bits(values: np.ndarray, direction: str) -> np.ndarray:
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    if direction == "nearest":
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    away = (bits >> 31 == 1) if direction == "down" else (bits >> 31 == 0)
    return np.where(away, (bits + 0xFFFF) >> 16, bits >> 16).astype(np.uint16)


def bf16_value(bits: int) -> np.float32:
    return np.array([int(bits) << 16], np.uint32).view(np.float32)[0]


def reference_int8(group: np.ndarray) -> tuple[int, int, bytes]:
    absmax = np.abs(group).max()
    scale = int(bf16_bits(np.array([absmax / np.float32(127)], np.float32), "nearest")[0])
    inverse = np.float32(1) / bf16_value(scale) if absmax > 0 else np.float32(0)
    return scale, 0, np.rint(group * inverse).astype(np.int8).tobytes()


def reference_int4(group: np.ndarray) -> tuple[int, int, bytes]:
    zero = int(bf16_bits(group.min(keepdims=True), "down")[0])
    half, halves = np.float32(0.5) * bf16_value(zero), np.float32(0.5) * group
    spread = halves.max() - half
    step = np.array([spread / np.float32(7.5)], np.float32)
    scale = int(bf16_bits(step, "up")[0]) if spread > 0 else 0
    inverse = np.float32(2) / bf16_value(scale) if scale else np.float32(0)
    codes = np.rint((halves - half) * inverse).astype(np.uint8)
    codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    return scale, zero, (codes[: len(codes) // 2] | codes[len(codes) // 2 :] << 4).tobytes()


def reference_wire(name: str, x: torch.Tensor) -> bytes:
    """The wire bytes of a tensor of normal, finite numbers."""
    one = reference_int4 if name == "int4" else reference_int8
    rows = x.float().reshape(-1, x.shape[-1]).numpy()
    size = GROUP[name]
    groups = [one(row[i : i + size]) for row in rows for i in range(0, len(row), size)]

    def section(values: list[int]) -> bytes:
        raw = np.array(values, np.uint16).tobytes()
        return raw + bytes(-len(raw) % 16)

    zeros = section([zero for _, zero, _ in groups]) if name == "int4" else b""
    return section([scale for scale, _, _ in groups]) + zeros + b"".join(c for _, _, c in groups)


def groups_of(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [g for row in x.reshape(-1, x.shape[-1]) for g in row.split(size)]


def scales_of(name: str, wire: torch.Tensor, num_groups: int) -> torch.Tensor:
    return wire[: 2 * num_groups].view(torch.bfloat16).double()


def assert_within_half_a_scale(name: str, x: torch.Tensor) -> None:
    codec = Codec(name)
    wire = codec.encode(x)
    decoded = codec.decode(wire, torch.empty_like(x))
    groups, back = groups_of(x, GROUP[name]), groups_of(decoded, GROUP[name])
    for group, got, scale in zip(groups, back, scales_of(name, wire, len(groups)), strict=True):
        error = (group.double() - got.double()).abs()
        # No scale is below the smallest normal number: groups up to half of it become zeros.
        half_step = scale.clamp(min=2.0**-126) / 2
        # The quotient is rounded, and so is the result to the output's dtype.
        quotient = group.double().abs() * 2.0**-22 + scale * 2.0**-17 * (name == "int4")
        output = got.double().abs().clamp(min=torch.finfo(x.dtype).tiny) * EPS[x.dtype]
        assert (error <= half_step + quotient + output).all(), (group, got, scale)
