"""tools/phase: what make says while it installs, and where it leaves the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

PHASE = Path(__file__).resolve().parent.parent / "tools" / "phase"


def run_phase(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PHASE, *words], cwd=folder, capture_output=True, text=True)


def test_phase_that_ends_well_keeps_its_output_in_the_log_and_notes_its_time(
    tmp_path: Path,
) -> None:
    done = run_phase(
        tmp_path, "-l", "build/log", "Building", "sh", "-c", "echo noise; echo bad >&2"
    )
    first, last = done.stdout.splitlines()
    assert first == "Building (log: build/log)"
    assert last.startswith("Building: done in ")
    assert done.returncode == 0
    assert (tmp_path / "build" / "log").read_text() == "noise\nbad\n"
    assert (tmp_path / "build" / "phases").read_text().startswith("Building: ")


def test_phase_that_fails_shows_the_logs_end_and_its_name_and_gives_the_exit_code(
    tmp_path: Path,
) -> None:
    done = run_phase(tmp_path, "-l", "build/log", "Building", "sh", "-c", "seq 100; exit 3")
    lines = done.stdout.splitlines()
    assert done.returncode == 3
    assert lines[1:-1] == [str(n) for n in range(81, 101)]
    assert "failed after" in lines[-1]
    assert lines[-1].endswith("(exit 3); all of it is in build/log")
    assert not (tmp_path / "build" / "phases").exists()


def test_phase_says_at_once_what_it_does(tmp_path: Path) -> None:
    command = [PHASE, "-l", "build/log", "Building", "sh", "-c", "read line"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as phase:
        assert phase.stdout is not None
        assert phase.stdout.readline() == "Building (log: build/log)\n"
        assert phase.poll() is None
        phase.communicate("\n")


def test_phase_without_a_log_shows_what_the_command_shows(tmp_path: Path) -> None:
    assert run_phase(tmp_path, "Training", "echo", "a table").stdout == "Training\na table\n"
    assert run_phase(tmp_path, "Training", "false").returncode == 1
