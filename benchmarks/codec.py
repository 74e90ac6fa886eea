"""How fast do codecs encode and decode on one core, against a copy of the same bytes?

GB/s count the tensor's bytes: the input of encode, the output of decode. The baseline is torch's
copy between two tensors of that size, timed in turn with the codecs. Beside int8 and int4 stands
the same arithmetic in torch operators, and beside int8 and nf4, where bitsandbytes is installed,
its blockwise 8 bits and NF4; these peers work on half of the tensor, and in float32 and
bfloat16 only.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from _harness import Timing, add_options, measure, report

from pipecomm import Codec

CODECS = [
    "int8",
    "int4",
    "int4-symmetric",
    "fp8",
    "nf4",
    "int8:hadamard=64",
    "int4:hadamard=64",
    "int4:hadamard=64,rounding=stochastic",
    "int4:spikes=1",
    "nf4:spikes=1",
]
# Largest error over the tensor's largest value, for normal values.
ERROR_LIMITS = {
    "int8": 0.5 / 127 + 2**-8,
    "int4": 1 / 15,
    "int4-symmetric": 1 / 14 + 2**-7,
    "fp8": 1 / 28 + 2**-8,
    "nf4": 0.16,
}
# No codec; a fill writes as much as a decoder and reads nothing: no decoder is faster.
PLAIN = ("copy", "fill")
# Part of the tensor that peers work on: still more than the caches hold.
PEER_SHARE = 2

# (encode, decode) of one tensor; decode takes what encode gave.
Peer = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def make_tensor(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nbytes // dtype.itemsize // 4096, 4096, generator=generator).to(dtype)


def checked_error(codec: Codec, x: torch.Tensor, decoded: torch.Tensor) -> float:
    """Largest error over the largest value; raises where it is out of bounds."""
    error = ((decoded.float() - x.float()).abs().max() / x.float().abs().max()).item()
    family, _, options = codec.name.partition(":")
    # A transform and noise spread errors: half a step becomes up to two.
    limit = ERROR_LIMITS[family] * (4 if options and not options.startswith("spikes") else 1)
    if not error <= limit:
        raise AssertionError(f"{codec} {x.dtype}: expected an error up to {limit}; got {error}")
    return error


def torch_int8(dtype: torch.dtype) -> Peer:
    def encode(x: torch.Tensor) -> Any:
        groups = x.float().view(-1, 64)
        scale = (groups.abs().amax(1, keepdim=True) / 127).bfloat16()
        return (groups * (1 / scale.float())).round().to(torch.int8), scale

    def decode(wire: Any) -> torch.Tensor:
        codes, scale = wire
        return (codes.float() * scale.float()).to(dtype).view(-1, 4096)

    return encode, decode


def torch_int4(dtype: torch.dtype) -> Peer:
    def encode(x: torch.Tensor) -> Any:
        groups = x.float().view(-1, 32)
        low, high = groups.aminmax(dim=1, keepdim=True)
        zero = low.bfloat16()
        scale = ((high - zero.float()) / 15).bfloat16()
        steps = (groups - zero.float()) * (1 / scale.float())
        codes = steps.round().clamp(0, 15).to(torch.uint8)
        return codes[:, :16] | codes[:, 16:] << 4, scale, zero

    def decode(wire: Any) -> torch.Tensor:
        codes, scale, zero = wire
        values = torch.cat((codes & 15, codes >> 4), 1).float() * scale.float() + zero.float()
        return values.to(dtype).view(-1, 4096)

    return encode, decode


def bitsandbytes_peers() -> dict[str, Peer]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    peer = importlib.import_module("bitsandbytes.functional")
    return {
        "int8": (
            lambda x: peer.quantize_blockwise(x, blocksize=64),
            lambda wire: peer.dequantize_blockwise(*wire, blocksize=64),
        ),
        "nf4": (
            lambda x: peer.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda wire: peer.dequantize_4bit(*wire, quant_type="nf4"),
        ),
    }


def peers_for(dtype: torch.dtype) -> dict[str, dict[str, Peer]]:
    """Name of the peer, then of our codec it stands beside, to the peer's functions."""
    if dtype == torch.float16:
        return {}
    ours = {"int8": torch_int8(dtype), "int4": torch_int4(dtype)}
    return {"torch": ours, "bitsandbytes": bitsandbytes_peers()}


def peer_calls(x: torch.Tensor, names: list[str]) -> dict[str, Callable[[], object]]:
    part = x[: x.shape[0] // PEER_SHARE].contiguous()
    calls: dict[str, Callable[[], object]] = {}
    for peer, functions in peers_for(x.dtype).items():
        for name in names:
            if name not in functions:
                continue
            encode, decode = functions[name]
            wire = encode(part)
            checked_error(Codec(name), part, decode(wire))
            calls[f"{peer} {name} encode"] = lambda f=encode, p=part: f(p)
            calls[f"{peer} {name} decode"] = lambda f=decode, w=wire: f(w)
    return calls


def rows_for(dtype: torch.dtype, codecs: list[Codec], options: Any) -> list[dict[str, Any]]:
    x = make_tensor(dtype, options.mib << 20)
    out = torch.empty_like(x)
    wires = {codec.name: codec.encode(x) for codec in codecs}
    errors = {c.name: checked_error(c, x, c.decode(wires[c.name], out)) for c in codecs}
    calls: dict[str, Any] = {"copy": lambda: out.copy_(x), "fill": lambda: out.fill_(1)}
    for codec in codecs:
        wire = wires[codec.name]
        calls[f"{codec} encode"] = lambda c=codec, w=wire: c.encode(x, w)
        calls[f"{codec} decode"] = lambda c=codec, w=wire: c.decode(w, out)
    ours = list(calls)
    calls |= peer_calls(x, [codec.name for codec in codecs])
    timings = measure(calls, options.rounds)
    return [
        row(f"{name} {str(dtype).removeprefix('torch.')}", timings[name], timings["copy"], x)
        | {
            "wire bytes": wires[name.split()[0]].numel() if name not in PLAIN else x.nbytes,
            "max error": errors[name.split()[0]] if name not in PLAIN else 0.0,
        }
        | {f"x {peer}": times_faster(timings, peer, name) for peer in ("torch", "bitsandbytes")}
        for name in ours
    ]


def times_faster(timings: dict[str, Timing], peer: str, name: str) -> float | str:
    """How many times as fast as the peer, per byte; empty where it has no such codec."""
    other = timings.get(f"{peer} {name}")
    return other.median_s * PEER_SHARE / timings[name].median_s if other else ""


def row(case: str, timing: Timing, copy: Timing, x: torch.Tensor) -> dict[str, Any]:
    return {
        "case": case,
        "payload bytes": x.nbytes,
        "median ms": timing.median_s * 1e3,
        "p90 ms": timing.p90_s * 1e3,
        "GB/s": x.nbytes / timing.median_s / 1e9,
        "copy GB/s": x.nbytes / copy.median_s / 1e9,
        "ratio": copy.median_s / timing.median_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor in MiB")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    codecs = [Codec(name) for name in options.codecs]
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows += rows_for(dtype, codecs, options)
    report("codec", rows, title=f"Codecs, {options.mib} MiB, one thread", save=options.json)


if __name__ == "__main__":
    main()
