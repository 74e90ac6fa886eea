"""`make device-check`: what only a GPU can show, in steps that end with one table and one JSON row.

`--rehearse` runs the same steps with the host as the device, or over the stand-in driver of
tests/fake_cuda where `--driver` names its folder; what needs silicon is skipped by name.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.device.plan import plan
from tests.device.steps import Machine, Outcome, run_steps

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 480.0
_TOOLS = ("compute-sanitizer", "nvidia-smi")


def find_gpus() -> list[str]:
    """A line for each, as the driver names them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def find_machine(options: argparse.Namespace, gpus: Sequence[str]) -> Machine:
    tools = frozenset(name for name in _TOOLS if shutil.which(name))
    if options.rehearse:
        return Machine(0, tools, has_driver=options.driver is not None)
    return Machine(len(gpus), tools)


def provenance(options: argparse.Namespace, gpus: Sequence[str]) -> dict[str, Any]:
    """Of the run, also where nothing could be built."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    built = subprocess.run(
        [sys.executable, "-m", "pipecomm", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": platform.platform(),
        "gpus": list(gpus),
        "is_rehearsal": options.rehearse,
        "over_stand_in_driver": options.driver is not None,
        "doctor": json.loads(built.stdout) if built.returncode == 0 else built.stderr[-2000:],
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each step; `why` as it is, for nobody looks at a cut reason twice."""
    width = max(len(outcome.step) for outcome in outcomes)
    lines = [
        f"{one.step:{width}}  {one.state:7}  {one.seconds:6.1f} s  {one.why}".rstrip()
        for one in outcomes
    ]
    counts = (
        f"{sum(outcome.state == state for outcome in outcomes)} {state}"
        for state in ("passed", "failed", "skipped")
    )
    return "\n".join([*lines, ", ".join(counts)])


def tell(outcome: Outcome) -> None:
    print(f"{outcome.step}: {outcome.state} ({outcome.seconds:.1f} s) {outcome.why}", flush=True)
    if outcome.output:
        print(outcome.output, flush=True)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--driver", type=Path, help="folder of the stand-in driver's libpipecomm")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="words that a step's name has")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds in all")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON"
    )
    options = parser.parse_args(words)
    if options.driver is not None and not (options.driver / "libpipecomm.so").is_file():
        parser.error(f"expected libpipecomm.so in {options.driver}; make cpp-test builds it")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    gpus = find_gpus()
    if not gpus and not options.rehearse:
        print("expected a GPU; nvidia-smi names none. make device-check-rehearsal needs none")
        return 3
    steps = plan(options)
    if options.only:
        steps = [step for step in steps if any(word in step.name for word in options.only)]
    outcomes = run_steps(steps, find_machine(options, gpus), options.limit, tell)
    row = {**provenance(options, gpus), "steps": [outcome.as_row() for outcome in outcomes]}
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / "device_check.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"\n{table(outcomes)}")
    return int(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
