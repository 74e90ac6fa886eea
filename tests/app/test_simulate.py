"""`pipecomm simulate`: where its costs come from, what it prints, writes and chooses."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pipecomm.app.cli import main
from pipecomm.app.simulate import _Bar
from pipecomm.schedule import build


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["simulate", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 2
    return capsys.readouterr().err


def test_costs_per_stage_and_latency_reach_the_simulation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--stages", "2", "--microbatches", "1", "--forward-ms", "1,3", "--backward-ms", "2,4"]
    assert document(capsys, *words)["step_s"] == pytest.approx(0.010)
    assert document(capsys, *words, "--latency-ms", "5")["step_s"] == pytest.approx(0.020)
    assert "2 of them for forward_s; got 3" in refusal(capsys, *words[:4], "--forward-ms", "1,2,3")


def test_weight_part_of_a_backward_is_taken_out_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedule", "zb-h1", "--stages", "4", "--microbatches", "8"]
    # (P-1)(F+I-W) idle: with W = 1 of 2 ms, 3 ms of 27.
    assert document(capsys, *words)["step_s"] == pytest.approx(0.027)
    assert document(capsys, *words, "--weight-ms", "0")["step_s"] == pytest.approx(0.033)


def test_costs_come_from_a_file_and_options_before_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward_s": 1, "backward_s": 1, "activation_nbytes": 1073741824}')
    words = ["--stages", "1", "--microbatches", "2", "--costs", str(path)]
    found = document(capsys, *words)
    assert (found["step_s"], found["peak_nbytes"]) == (4, [2**30])
    assert document(capsys, *words, "--forward-ms", "3000")["step_s"] == 8
    assert main(["simulate", *words]) == 0
    assert "1 microbatches in memory, 1 GiB" in capsys.readouterr().out


def test_schedule_of_a_file_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    build("zb-v", 4, 3).to_csv(path)
    found = document(capsys, "--csv", str(path))
    assert (found["schedule"], found["stages"], found["ranks"]) == ("mine", 4, 2)
    path.write_text("0F0,0B0\n1F0\n")
    assert "got 1 missing: 1B0" in refusal(capsys, "--csv", str(path))
    assert "No such file" in refusal(capsys, "--csv", str(tmp_path / "none.csv"))
    assert "No such file" in refusal(capsys, "--costs", str(tmp_path / "none.json"))


def test_sizes_and_options_of_a_schedule_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--schedule", "interleaved", "--stages", "8", "--ranks", "4")
    assert found["ranks"] == 4
    words = ["--schedule", "pipedream-2bw", "--stages", "2", "--microbatches", "9"]
    assert "got 9; 8 and 10 are possible" in refusal(capsys, *words)
    assert document(capsys, *words, "--update-every", "3")["microbatches"] == 9
    planned = ["--schedule", "planned", "--latency-ms", "2", "--max-activations", "2"]
    assert max(document(capsys, *planned)["peak_activations"]) == 2


@pytest.mark.parametrize("name", ["plan.svg", "plan.png", "plan.json"])
def test_plot_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    document(capsys, "--plot", str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000
    text = refusal(capsys, "--plot", str(tmp_path / "none" / name))
    assert "expected a file that can be used; got" in text


def test_comparison_shows_every_schedule_and_says_which_to_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", "--compare", "--stages", "4", "--microbatches", "6"]
    assert main(words) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert (
        "as many microbatches as stages; got 6 for 8; 8 and more are possible"
        in lines["dualpipe-v"]
    )
    assert "(several updates a step)" in lines["pipedream"]
    assert text.splitlines()[-1] == "take zb-v (the fastest with one update a step)"
    assert main([*words, "--memory-limit", "1"]) == 0
    assert "take sequential under 1 microbatches" in capsys.readouterr().out
    assert main([*words, "--memory-limit", "0.5"]) == 0
    assert "no schedule keeps to 0.5 microbatches" in capsys.readouterr().out


def test_page_of_schedules_shows_what_its_commands_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    shown = re.findall(r"```sh\npipecomm ([^\n]*)\n```\n```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output


def test_comparison_as_json_has_numbers_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--compare", "--stages", "2", "--microbatches", "3")
    by_name = {row["schedule"]: row for row in found["schedules"]}
    assert found["take"] == "zb-v"
    assert by_name["gpipe"]["peak_microbatches"] == 3
    assert by_name["pipedream"]["synchronous"] is False
    assert "refused" in by_name["dualpipe-v"]


def test_memory_limit_is_in_gib_where_costs_have_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"weights_nbytes": 2**30, "activation_nbytes": 2**29}))
    words = ["--compare", "--stages", "4", "--microbatches", "8", "--costs", str(path)]
    assert document(capsys, *words, "--memory-limit", "2")["take"] == "sequential"
    assert document(capsys, *words, "--memory-limit", "3.01")["take"] == "zb-v"


def test_large_schedules_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--stages", "40", "--microbatches", "200"]) == 0
    text = capsys.readouterr().out
    assert "slot" not in text
    assert "... 40 ranks in all" in text


def test_bar_is_shown_on_a_terminal_after_two_seconds_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("pipecomm.app.simulate.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with _Bar() as bar:
        now_s[0] = 1.9
        bar(0.1)
        assert bar._shown is None
        now_s[0] = 2.1
        bar(0.2)
        assert bar._shown is not None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with _Bar() as bar:
        now_s[0] = 10.0
        bar(0.5)
        assert bar._shown is None
    assert capsys.readouterr().out == ""
