"""How fast do the CUDA codecs encode and decode, against a copy on the device?

Bytes read plus bytes written per second; the baseline is a device-to-device copy of the same
tensor, timed in turn with the codecs by device events.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _harness import add_options, report

from pipecomm import Codec

# Tensors used in turn, so that none is still in the cache when its turn comes again.
NUM_SETS = 4


def device_times_s(
    calls: dict[str, Callable[[int], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each call by device events, in turn; a call gets the number of its tensor set."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(-2, max(rounds, 2)):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(index % NUM_SETS)
            end.record()
            end.synchronize()
            if index >= 0:
                samples[name].append(begin.elapsed_time(end) / 1e3)
    return samples


def rows_for(dtype: torch.dtype, codecs: list[Codec], options: Any) -> list[dict[str, Any]]:
    numel = (options.mib << 20) // dtype.itemsize
    sets = [torch.randn(numel // 4096, 4096, device="cuda").to(dtype) for _ in range(NUM_SETS)]
    outs = [torch.empty_like(x) for x in sets]
    calls: dict[str, Callable[[int], object]] = {"copy": lambda i: outs[i].copy_(sets[i])}
    moved = {"copy": 2 * sets[0].nbytes}
    for codec in codecs:
        wires = [codec.encode(x) for x in sets]
        check(codec, sets[0], wires[0])
        calls[f"{codec} encode"] = lambda i, c=codec, w=wires: c.encode(sets[i], w[i])
        calls[f"{codec} decode"] = lambda i, c=codec, w=wires: c.decode(w[i], outs[i])
        for name in ("encode", "decode"):
            moved[f"{codec} {name}"] = sets[0].nbytes + wires[0].nbytes
    samples = device_times_s(calls, options.rounds)
    copy_rate = moved["copy"] / statistics.median(samples["copy"])
    return [
        row(name, dtype, sets[0].nbytes, moved[name], samples[name], copy_rate) for name in calls
    ]


def check(codec: Codec, x: torch.Tensor, wire: torch.Tensor) -> None:
    part = x[:256].cpu()
    assert torch.equal(codec.encode(x[:256]).cpu(), codec.encode(part)), codec
    out = codec.decode(wire, torch.empty_like(x))
    assert ((out - x).float().norm() / x.float().norm()).item() < 0.2, codec


def row(
    name: str, dtype: torch.dtype, nbytes: int, moved: int, samples: list[float], copy_rate: float
) -> dict[str, Any]:
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    rate = moved / statistics.median(samples)
    return {
        "case": f"{name} {str(dtype).removeprefix('torch.')}",
        "payload bytes": nbytes,
        "median us": statistics.median(samples) * 1e6,
        "p90 us": deciles[-1] * 1e6,
        "GB/s moved": rate / 1e9,
        "of copy": rate / copy_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor in MiB")
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=[
            "int8",
            "int8:hadamard=64",
            "int4",
            "int4:hadamard=64",
            "int4-symmetric",
            "fp8",
            "nf4",
        ],
    )
    add_options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "codec_cuda.py: expected a GPU; torch finds none here\n")
    codecs = [Codec(name) for name in options.codecs]
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows += rows_for(dtype, codecs, options)
    title = f"Codecs on {torch.cuda.get_device_name()}, {options.mib} MiB"
    report("codec_cuda", rows, title=title, save=options.json)


if __name__ == "__main__":
    main()
