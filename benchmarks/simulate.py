"""How long does it take to build, check and simulate a thousand ranks, in how much memory?

Each size runs in a process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from _harness import add_save_option, report

CHILD = """
import json, resource, sys, time
from pipecomm.schedule import Costs, build
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
name, num_ranks, num_microbatches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
began_s = time.perf_counter(), time.process_time()
schedule = build(name, num_ranks, num_microbatches)
built_s = time.perf_counter()
result = schedule.simulate(Costs(1.0, 2.0))
ended_s = time.perf_counter(), time.process_time()
ideal_s = (num_microbatches + num_ranks - 1) * 3.0
assert name != "1f1b" or abs(result.step_s - ideal_s) < 1e-6 * ideal_s
print(json.dumps({
    "build_s": built_s - began_s[0], "simulate_s": ended_s[0] - built_s,
    "cpu_s": ended_s[1] - began_s[1], "bubble": result.bubble,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    "before_gb": before_kib * 1024 / 1e9,
}))
"""


def run(name: str, num_ranks: int, num_microbatches: int) -> dict[str, object]:
    """One row of the table."""
    command = [sys.executable, "-c", CHILD, name, str(num_ranks), str(num_microbatches)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    num_actions = num_ranks * num_microbatches * (3 if name == "zb-h1" else 2)
    return {"case": f"{name} {num_ranks:,} x {num_microbatches:,}", "actions": num_actions, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="of the largest schedules")
    add_save_option(parser)
    args = parser.parse_args()
    sizes = [(args.ranks // 8, args.ranks // 2), (args.ranks, 4 * args.ranks)]
    rows = [run(name, *size) for size in sizes for name in ("1f1b", "zb-h1")]
    report("simulate", rows, title="Building, checking and simulating", save=args.json)


if __name__ == "__main__":
    main()
