"""What do the first uses of a GPU in a process cost, which later ones do not?

Each row is a fresh process, by how it loads kernels (CUDA_MODULE_LOADING): the first encode loads
all kernels of the codecs at once, so that no launch has to wait for what is enqueued.
`--device cpu` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from _harness import add_options, report

from pipecomm import Codec

LOADING = ("LAZY", "EAGER")


def measure_here(device: str) -> dict[str, float]:
    """Milliseconds of each first use, and of one that is not."""
    times: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        start = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        times[name] = (time.perf_counter() - start) * 1e3
        return result

    codec = Codec("int8")
    x = timed("first tensor ms", lambda: torch.ones(1 << 20, device=device))
    wire = timed("first encode ms", lambda: codec.encode(x))
    timed("first decode ms", lambda: codec.decode(wire, torch.empty_like(x)))
    timed("other codec ms", lambda: Codec("int4").encode(x))
    timed("again ms", lambda: codec.encode(x))
    assert torch.equal(codec.decode(wire, torch.empty_like(x)).cpu(), torch.ones(1 << 20))
    return times


def measure(loading: str, device: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, __file__, "--here", "--device", device],
        env={**os.environ, "CUDA_MODULE_LOADING": loading},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(run.stderr)
    times: dict[str, float] = json.loads(run.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--here", action="store_true", help="in this process, once, as JSON")
    add_options(parser)
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(3, "first_use_cuda.py: expected a GPU; torch finds none here\n")
    if options.here:
        print(json.dumps(measure_here(options.device)))
        return
    rows: list[dict[str, Any]] = []
    samples: dict[str, list[dict[str, float]]] = {loading: [] for loading in LOADING}
    for _ in range(options.rounds):
        for loading in LOADING:
            samples[loading].append(measure(loading, options.device))
    for loading, taken in samples.items():
        medians = {name: statistics.median(times[name] for times in taken) for name in taken[0]}
        rows.append({"case": f"CUDA_MODULE_LOADING={loading}", **medians})
    report("first_use_cuda", rows, title=f"First uses, {options.device}", save=options.json)


if __name__ == "__main__":
    main()
