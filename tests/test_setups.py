"""Set-ups of the literature: the page shows what the command prints, and the numbers are sane."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent


def run(*options: str) -> str:
    command = [sys.executable, "benchmarks/setups.py", *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=patient(60)
    ).stdout


def test_table_of_the_page_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text()
    assert "python benchmarks/setups.py" in page
    assert run() in page


def test_four_bits_and_faster_links_never_cost_time() -> None:
    rows = [json.loads(line) for line in run("--json").splitlines()]
    by_case = {(r["setup"], r["link"], r["codec"], r["schedule"]): r for r in rows}
    assert len(by_case) == len(rows) == 2 * 4 * 2 * 2
    for (setup, link, codec, schedule), row in by_case.items():
        assert row["step_s"] <= by_case[setup, "10 Gbit/s", codec, schedule]["step_s"]
        if codec == "int4":
            raw = by_case[setup, link, "raw", schedule]
            assert row["step_s"] <= raw["step_s"]
            assert row["link_nbytes"] < 0.35 * raw["link_nbytes"]
