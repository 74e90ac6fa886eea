"""What gets done while no multiprocessor is free, and so needs none?

A kernel fills every multiprocessor for a while; meanwhile another stream does one thing. What ends
before the kernel was a copy engine's; what waits for it may be a kernel, the driver's own included.
The codecs, which are kernels, must wait: without that the rows say nothing.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _harness import add_options, report

from pipecomm import Codec
from pipecomm.links.link import Links

_NBYTES = 16 << 20
_BLOCK_THREADS = 1024
# Of the largest GPU today; blocks that find no room wait, which keeps the others full for longer.
_BLOCKS_PER_PROCESSOR = 2
_CYCLES = 400_000_000
_SPIN = """
extern "C" __global__ void spin(float* out, int cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
  if (cycles < 0) *out = 0;
}
"""


class Filled:
    """Every multiprocessor is busy from `start()` on, for a fifth of a second or so."""

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(_SPIN, "spin")
        self._out = torch.zeros(1, device="cuda")
        self._stream = torch.cuda.Stream()
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin = torch.cuda.Event(enable_timing=True)
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self._grid = (count * _BLOCKS_PER_PROCESSOR, 1, 1)

    def start(self) -> None:
        self._begin.record(self._stream)
        self._kernel(self._grid, (_BLOCK_THREADS, 1, 1), (self._out, _CYCLES), stream=self._stream)
        self._end.record(self._stream)

    def ms_after_begin(self, call: Callable[[], object]) -> tuple[float, float]:
        """When the call's work and the kernel ended, in milliseconds after it began."""
        other, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.start()
        with torch.cuda.stream(other):
            call()
            done.record()
        torch.cuda.synchronize()
        return self._begin.elapsed_time(done), self._begin.elapsed_time(self._end)


class Both:
    """Two ranks of this process, on one GPU, with slots between them."""

    def __init__(self) -> None:
        store, made = dist.HashStore(), {}

        def connect(rank: int) -> None:
            made[rank] = Links.connect(store, rank, 2, timeout_s=60, device=torch.device("cuda", 0))

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.links = [made[0], made[1]]
        self.number = 0
        for links in self.links:
            links.begin_step(1)

    def cross(self, tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
        self.number += 1
        low, high = self.links
        low.send(1, [tensor], direction="forward", microbatch=self.number, codec=codec)
        (got,) = high.receive(
            0, direction="forward", microbatch=self.number, device=tensor.device
        ).wait()
        assert got is not None
        return got

    def close(self) -> None:
        for links in self.links:
            links.close()


def cases(both: Both) -> dict[str, Callable[[], object]]:
    x = torch.randn(_NBYTES // 4, device="cuda")
    out, host = torch.empty_like(x), torch.randn(_NBYTES // 4).pin_memory()
    int8, raw = Codec("int8"), Codec("raw")
    wire = int8.encode(x)
    assert torch.equal(both.cross(x, raw), x)
    return {
        "encode (must wait)": lambda: int8.encode(x, wire),
        "copy to the host": lambda: host.copy_(x, non_blocking=True),
        "copy from the host": lambda: out.copy_(host, non_blocking=True),
        "copy inside the GPU": lambda: out.copy_(x),
        "transfer in slots, raw": lambda: both.cross(x, raw),
        "transfer in slots, int8": lambda: both.cross(x, int8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "engines_cuda.py: expected a GPU; torch finds none here\n")
    filled, both = Filled(), Both()
    rows: list[dict[str, Any]] = []
    for name, call in cases(both).items():
        call()
        ends = [filled.ms_after_begin(call) for _ in range(options.rounds)]
        rows.append(
            {
                "case": name,
                "ended before": f"{sum(done < full for done, full in ends)} of {len(ends)}",
                "ended ms": min(done for done, _ in ends),
                "multiprocessors full ms": min(full for _, full in ends),
            }
        )
        if name.startswith("encode"):
            assert all(done >= full for done, full in ends), "the multiprocessors were not full"
    both.close()
    report("engines_cuda", rows, title="While no multiprocessor is free", save=options.json)


if __name__ == "__main__":
    main()
