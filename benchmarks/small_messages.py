"""From which size on does a codec pay, and on how fast a link?

Coding takes the place of the two copies through a link's ring, and saves bytes. `pays_below`: on a
link of fewer GB/s the bytes saved take longer than what coding costs beyond the copies; inf where
it costs less. One core, all in its caches, as small messages are.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from typing import Any

import torch
from _harness import add_options, measure, report

from pipecomm import Codec
from pipecomm._native import core

CODECS = ("int8", "int4")
SIZES = (64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
COLS = 1024
TOTAL_NBYTES = 1 << 20  # of each timing: short calls are repeated


def row_of(codec: Codec, dtype: torch.dtype, nbytes: int, rounds: int) -> dict[str, Any]:
    numel = nbytes // dtype.itemsize
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.view(-1, min(COLS, numel))
    wire, back, shape = codec.encode(x), torch.empty_like(x), (len(x), x.shape[1])
    ring, copied = torch.empty_like(x), torch.empty_like(x)
    name, kind = codec.name, str(dtype).removeprefix("torch.")
    repeats = min(1000, TOTAL_NBYTES // nbytes)
    source, coded, target = x.data_ptr(), wire.data_ptr(), back.data_ptr()
    between, end = ring.data_ptr(), copied.data_ptr()

    def code() -> None:
        for _ in range(repeats):
            core.codec_encode(name, kind, source, *shape, coded, None)
            core.codec_decode(name, kind, coded, *shape, target)

    def copy() -> None:
        for _ in range(repeats):
            ctypes.memmove(between, source, nbytes)
            ctypes.memmove(end, between, nbytes)

    found = measure({"code": code, "copy": copy}, rounds)
    assert torch.equal(codec.decode(wire, torch.empty_like(x)), back)
    assert torch.equal(copied, x)
    code_us, copy_us = (found[key].p10_s / repeats * 1e6 for key in ("code", "copy"))
    saved_nbytes, cost_us = nbytes - wire.numel(), code_us - copy_us
    return {
        "case": f"{name} {kind}",
        "nbytes": nbytes,
        "saved_nbytes": saved_nbytes,
        "code_us": code_us,
        "copy_us": copy_us,
        "pays_below_GB/s": saved_nbytes / cost_us / 1e3 if cost_us > 0 else math.inf,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    rows = [
        row_of(Codec(name), dtype, nbytes, options.rounds)
        for name in CODECS
        for dtype in (torch.float32, torch.bfloat16)
        for nbytes in SIZES
    ]
    report("small_messages", rows, title="Coding instead of two copies", save=options.json)


if __name__ == "__main__":
    main()
