"""How fast do codecs encode and decode on one core, against a copy of the same bytes?

GB/s count the tensor's bytes: the input of encode, the output of decode. The baseline is torch's
copy between two tensors of that size, timed in turn with the codecs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _harness import Timing, add_options, measure, report

from pipecomm import Codec

# Largest error over the tensor's largest value, for normal values.
ERROR_LIMITS = {"int8": 0.5 / 127 + 2**-8, "int4": 1 / 15}


def make_tensor(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nbytes // dtype.itemsize // 4096, 4096, generator=generator).to(dtype)


def checked_error(codec: Codec, x: torch.Tensor, decoded: torch.Tensor) -> float:
    """Largest error over the largest value; raises where it is out of bounds."""
    error = ((decoded.float() - x.float()).abs().max() / x.float().abs().max()).item()
    limit = ERROR_LIMITS[codec.name.split(":")[0]]
    if not error <= limit:
        raise AssertionError(f"{codec} {x.dtype}: expected an error up to {limit}; got {error}")
    return error


def rows_for(dtype: torch.dtype, codecs: list[Codec], options: Any) -> list[dict[str, Any]]:
    x = make_tensor(dtype, options.mib << 20)
    out = torch.empty_like(x)
    wires = {codec.name: codec.encode(x) for codec in codecs}
    errors = {c.name: checked_error(c, x, c.decode(wires[c.name], out)) for c in codecs}
    calls: dict[str, Any] = {"copy": lambda: out.copy_(x)}
    for codec in codecs:
        wire = wires[codec.name]
        calls[f"{codec} encode"] = lambda c=codec, w=wire: c.encode(x, w)
        calls[f"{codec} decode"] = lambda c=codec, w=wire: c.decode(w, out)
    timings = measure(calls, options.rounds)
    return [
        row(f"{name} {str(dtype).removeprefix('torch.')}", timing, timings["copy"], x)
        | {
            "wire bytes": wires[name.split()[0]].numel() if name != "copy" else x.nbytes,
            "max error": errors[name.split()[0]] if name != "copy" else 0.0,
        }
        for name, timing in timings.items()
    ]


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
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
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
