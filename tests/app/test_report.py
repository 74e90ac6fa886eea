"""What a training shows: lines or a bar on stderr, a table or a document on stdout."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from pipecomm.app.report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def start(*, is_emulated: bool = True, num_steps: int = 20) -> dict[str, Any]:
    text = "emulated link: 43 Mbit/s, 0 ms" if is_emulated else "real link"
    link = {"is_emulated": is_emulated, "mbps": 43.0, "latency_ms": 0.0, "text": text}
    return {"event": "start", "data": "some text", "link": link, "num_steps": num_steps}


def step(number: int, run: str = "raw") -> dict[str, Any]:
    return {
        "event": "step",
        "run": run,
        "step": number,
        "loss": 2.5,
        "tokens_per_s": 1234.0,
        "wire_nbytes": 5_000_000,
    }


def run_result(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "codec": name,
        "grad_codec": name,
        "codecs": [name] * 2,
        "grad_codecs": [name] * 2,
        "first_loss": 5.6,
        "train_loss": 2.0,
        "held_out_loss": 2.0,
        "step_s": 0.2,
        "tokens_per_s": 5000.0,
        "bubble": 0.5,
        "exposed_comm_s": 0.08,
        "payload_nbytes_sent": 1_000_000,
        "wire_nbytes_sent": 1_000_000,
        "last_step": {"planned_step_s": 0.1, "text": "1f1b: step 200 ms, planned 100 ms"},
        "files": [f"out/{name}.png"],
        **changes,
    }


def result(*runs: dict[str, Any]) -> dict[str, Any]:
    return {**start(), "event": "result", "runs": list(runs)}


COMPARED = (
    run_result("raw"),
    run_result("int4", held_out_loss=2.01, step_s=0.1, wire_nbytes_sent=200_000),
)


def show(*events: dict[str, Any], as_json: bool = False, terminal: bool = False) -> tuple[str, str]:
    stdout, stderr = io.StringIO(), Terminal() if terminal else io.StringIO()
    report = Report(stdout, stderr, as_json=as_json)
    for event in events:
        report(event)
    report.close()
    return stdout.getvalue(), stderr.getvalue()


def test_progress_without_a_terminal_is_the_first_step_and_ten_more_lines() -> None:
    stdout, stderr = show(start(num_steps=100), *(step(k + 1) for k in range(100)))
    lines = stderr.splitlines()
    assert stdout == ""
    assert len(lines) == 12
    assert "step 1/100" in lines[1]
    assert lines[-1].startswith("raw: step 100/100 loss 2.500 1,234 tokens/s 5.0 MB on wire")


@pytest.mark.parametrize("terminal", [False, True])
def test_emulated_link_is_named_with_every_number_of_it(terminal: bool) -> None:
    _, stderr = show(start(), step(20), terminal=terminal)
    assert "emulated link: 43 Mbit/s" in stderr
    assert "5.0 MB on wire (emulated)" in stderr
    assert "emulated" in show(start(), result(*COMPARED))[0].splitlines()[0]


def test_real_link_is_never_called_emulated() -> None:
    _, stderr = show(start(is_emulated=False), step(20))
    assert "emulated" not in stderr


def test_terminal_gets_a_bar_per_run() -> None:
    _, stderr = show(start(), step(20), step(10, "int4"), terminal=True)
    assert "20/20" in stderr
    assert "10/20" in stderr
    assert "int4" in stderr


def test_table_has_a_column_per_run_and_the_comparison() -> None:
    stdout, _ = show(start(), result(*COMPARED))
    rows = {line.split("│")[1].strip(): line for line in stdout.splitlines() if "│" in line}
    assert "+0.50%" in rows["loss, held-out"]
    assert "2.00 x faster" in rows["step time (ms)"]
    assert "20.0%" in rows["bytes sent (MB)"]
    assert "5.00 x" in rows["compression ratio"]
    assert "80.0" in rows["exposed communication (ms/step)"]
    assert "50.0%" in rows["bubble"]
    assert "wrote out/int4.png" in stdout
    assert "int4, last step: 1f1b: step 200 ms, planned 100 ms" in stdout


def test_table_of_one_run_compares_nothing() -> None:
    stdout, _ = show(start(), result(run_result("raw")))
    assert "faster" not in stdout
    assert "held-out" in stdout


def test_table_of_one_stage_needs_no_traffic() -> None:
    silent = {"payload_nbytes_sent": 0, "wire_nbytes_sent": 0}
    stdout, _ = show(start(), result(run_result("raw", **silent), run_result("int4", **silent)))
    assert "1.00 x" in stdout


def test_json_is_one_document_with_the_comparison() -> None:
    stdout, stderr = show(start(), step(20), result(*COMPARED), as_json=True)
    document = json.loads(stdout)
    assert [run["name"] for run in document["runs"]] == ["raw", "int4"]
    assert document["link"]["is_emulated"] is True
    assert document["compared"] == {
        "train_loss_change": 0.0,
        "held_out_loss_change": pytest.approx(0.005),
        "step_speedup": 2.0,
        "wire_nbytes_ratio": 0.2,
    }
    assert "tokens/s" in stderr


def test_nothing_is_left_open_when_the_training_ends_early() -> None:
    stdout, stderr = show(start(), step(5), terminal=True)
    assert stdout == ""
    # The cursor that the bar hides comes back.
    assert stderr.count("\x1b[?25l") == stderr.count("\x1b[?25h") == 1


def test_what_auto_took_is_printed_as_it_can_be_asked_for_again() -> None:
    stdout = io.StringIO()
    report = Report(stdout, io.StringIO(), as_json=False)
    report(start())
    report(result(run_result("auto", codecs=["raw", "int8"], grad_codecs=["raw", "raw"])))
    assert "auto took codec=['raw', 'int8'], grad_codec=['raw', 'raw']\n" in stdout.getvalue()
