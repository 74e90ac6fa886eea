"""The device check's own machinery, which needs no GPU, and its rehearsal.

A step that fails, hangs or is not there is told as such, and the rest go on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.device import check
from tests.device.plan import plan
from tests.device.steps import Machine, Outcome, Step, run_steps

# What has to be seen on a GPU, and on no stand-in.
SILICON = {
    "build",
    "codec bytes equal the host's",
    "illegal access in one rank",
    "memory full of torch's cache",
    "codecs under compute-sanitizer",
    "codecs against the copy rate",
    "what waits for multiprocessors",
}
ONE_GPU = Machine(1, frozenset(check._TOOLS))


def step(name: str, code: str, limit_s: float = 60.0, **options: Any) -> Step:
    return Step(name, [sys.executable, "-c", code], limit_s, Path.cwd(), **options)


def run(*steps: Step, machine: Machine = ONE_GPU, limit_s: float = 100.0) -> dict[str, Outcome]:
    told: list[Outcome] = []
    outcomes = run_steps(steps, machine, limit_s, told.append)
    assert told == outcomes
    return {outcome.step: outcome for outcome in outcomes}


def steps_of(*words: str) -> list[Step]:
    return plan(check.parse(words))


def test_step_that_fails_hangs_or_cannot_start_is_told_and_the_rest_go_on(tmp_path: Path) -> None:
    survivor = tmp_path / "survivor"
    child = f"import time; time.sleep(4); open({str(survivor)!r}, 'w')"
    leaves_a_child = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('waiting', flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    found = run(
        step("fails", "print('because'); raise SystemExit(7)"),
        step("hangs", leaves_a_child, limit_s=2),
        Step("absent", ["/nonexistent/program"], 5, Path.cwd()),
        step("works", "import os; assert os.environ['GIVEN'] == '1'", env={"GIVEN": "1"}),
    )
    assert {name: outcome.state for name, outcome in found.items()} == {
        "fails": "failed",
        "hangs": "failed",
        "absent": "failed",
        "works": "passed",
    }
    assert (found["fails"].why, found["fails"].output) == ("exit code 7", "because")
    assert (found["hangs"].why, found["hangs"].output) == ("not done after 2 s", "waiting")
    assert "/nonexistent/program" in found["absent"].output
    time.sleep(max(0.0, started + 7 - time.monotonic()))
    assert not survivor.exists(), "what a step starts ends with it"


def test_time_in_all_is_kept_and_what_had_none_says_so() -> None:
    found = run(step("long", "import time; time.sleep(60)"), step("late", ""), limit_s=1.5)
    assert found["long"].state == "failed"
    assert (found["late"].state, found["late"].why) == ("skipped", "no time was left for it")


def test_need_that_is_not_met_is_the_reason_of_the_skip() -> None:
    found = run(
        step("one", "raise SystemExit(1)", needs=[lambda machine: f"{machine.num_gpus} is few"]),
        step("two", "", needs=[lambda machine: ""]),
    )
    assert (found["one"].state, found["one"].why) == ("skipped", "1 is few")
    assert found["two"].state == "passed"


def test_what_tests_of_a_step_leave_out_is_told_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import pytest\n@pytest.mark.skip(reason='no IPC')\ndef test(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", str(file)]
    found = run(
        Step("some", command, 100, tmp_path), Step("none", [*command, "-kx"], 100, tmp_path)
    )
    assert (found["some"].state, found["some"].why) == ("passed", "left out (1): no IPC")
    assert found["none"].state == "failed"


def test_steps_fit_into_eight_minutes_and_each_has_a_name_and_limit_of_its_own() -> None:
    steps = steps_of()
    assert len({step.name for step in steps}) == len(steps) > 12
    assert all(0 < step.limit_s <= 150 for step in steps)
    assert check.parse([]).limit == 480


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine(2, frozenset(check._TOOLS)), set()),
        (ONE_GPU, {"each process on its own GPU only"}),
        (Machine(1), {"each process on its own GPU only", "codecs under compute-sanitizer"}),
    ],
)
def test_steps_that_a_machine_with_gpus_cannot_run(machine: Machine, expected: set[str]) -> None:
    left_out = {step.name for step in steps_of() if any(need(machine) for need in step.needs)}
    assert left_out == expected


def test_rehearsal_leaves_out_what_needs_silicon_and_says_so_of_each() -> None:
    reasons = {
        step.name: "; ".join(need(Machine(0)) for need in step.needs)
        for step in steps_of("--rehearse")
        if step.needs
    }
    assert {name for name, reason in reasons.items() if "needs silicon: " in reason} == SILICON
    assert "needs two GPUs; there are 0" in reasons["each process on its own GPU only"]


def test_rehearsal_runs_over_the_stand_in_driver_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "libpipecomm.so").touch()
    for made in steps_of("--rehearse", "--driver", str(tmp_path))[1:]:
        assert made.env["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path)
        assert made.env["FAKE_CUDA_STAND_IN"] == "1"
    with pytest.raises(SystemExit):
        steps_of("--rehearse", "--driver", str(tmp_path / "nothing"))


def test_gpu_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "find_gpus", list)
    assert check.main(["--results", str(tmp_path)]) == 3
    assert "expected a GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_those_that_the_driver_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.159.04'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert check.find_gpus() == ["NVIDIA H200, 143771 MiB, 580.159.04"]
    program.write_text("#!/bin/sh\necho 'no driver'; exit 9\n")
    assert check.find_gpus() == []


def test_run_ends_with_a_table_and_a_row_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps = [step("good", ""), step("bad", "raise SystemExit(2)"), step("other", "")]
    monkeypatch.setattr(check, "plan", lambda options: steps)
    words = ["--rehearse", "--results", str(tmp_path / "new"), "--only", "good", "bad"]
    assert check.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert lines[-2].split()[:2] == ["bad", "failed"]
    (row,) = map(json.loads, (tmp_path / "new" / "device_check.jsonl").read_text().splitlines())
    assert [(one["step"], one["state"], one["why"]) for one in row["steps"]] == [
        ("good", "passed", ""),
        ("bad", "failed", "exit code 2"),
    ]
    assert row["is_rehearsal"] is True
    assert row["commit"]
    assert any(part["part"] == "CUDA driver" for part in row["doctor"])


def test_rehearsal_of_the_paths_says_which_ran(tmp_path: Path) -> None:
    assert check.main(["--rehearse", "--only", "paths", "--results", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "device_check.jsonl").read_text())
    assert row["steps"][0]["why"] == "left out (1): IPC handles: the host as a device has none"


@pytest.mark.slow
def test_whole_rehearsal_passes_all_that_needs_no_silicon(tmp_path: Path) -> None:
    words = ["--rehearse", "--limit", "1500", "--results", str(tmp_path)]
    assert check.main(words) == 0
    steps = json.loads((tmp_path / "device_check.jsonl").read_text())["steps"]
    skipped = {one["step"] for one in steps if one["state"] == "skipped"}
    assert skipped == SILICON | {"each process on its own GPU only"}
