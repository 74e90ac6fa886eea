"""The commands without ranks: simulate, doctor, and everything that `train` refuses at once."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pipecomm.app.cli import main
from pipecomm.errors import PeerLostError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank that would be started all the same fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pipecomm: error: ")
    return captured.err


@pytest.mark.parametrize("option", ["--codec", "--grad-codec"])
def test_unknown_codec_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    text = refusal(capsys, "train", option, "int3")
    assert "int3" in text
    assert "raw" in text
    assert "int8" in text
    assert "int4" in text


def test_unknown_schedule_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("train", "simulate"):
        text = refusal(capsys, command, "--schedule", "2f2b")
        assert "2f2b" in text
        assert "gpipe, 1f1b" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "nowhere"], "nowhere: cannot be read"),
        (["--stages", "5", "--layers", "4"], "4 layers for 5 stages"),
        (["--stages-per-rank", "2"], "1f1b: expected as many stages as ranks; got 4 stages on 2"),
        (["--batch-size", "3", "--microbatches", "4"], "--batch-size 3 for 4 microbatches"),
        (["--width", "30"], "got 30"),
        (["--compare", "--codec", "raw", "--grad-codec", "raw"], "raw and raw"),
        (["--out", "/proc/nowhere"], "--out: expected a folder to write to; got /proc/nowhere"),
    ],
)
def test_impossible_training_is_refused_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert text in refusal(capsys, "train", *words)


def test_port_in_use_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"got {port}, which is in use" in refusal(capsys, "train", "--port", str(port))


def test_incomplete_environment_of_a_rank_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "no WORLD_SIZE" in refusal(capsys, "train")


def test_json_refusal_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--schedule", "x", "--json"]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["exit_code"] == 2
    assert f"pipecomm: error: {document['error']}\n" == captured.err


@pytest.mark.parametrize(("error", "code"), [(PeerLostError("x"), 1), (KeyboardInterrupt(), 130)])
def test_other_errors_have_their_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("pipecomm.schedule.build", fail)
    assert main(["simulate"]) == code
    assert capsys.readouterr().err.startswith("pipecomm: error: ")


def test_simulation_shows_the_grid_and_the_known_bubble(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--stages", "4", "--microbatches", "8", "--forward-ms", "1", "--backward-ms", "1"]
    assert main(["simulate", "--schedule", "1f1b", *words]) == 0
    text = capsys.readouterr().out
    assert "step 22 ms, bubble 27.3%" in text
    assert text.count("microbatches in memory") == 3
    assert text.count("at most 1 microbatch in memory") == 1
    assert "rank 3" in text


def test_simulation_counts_transfers_that_compute_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", "--stages", "2", "--microbatches", "1", "--transfer-ms", "5", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    # 0F0 1 ms, transfer 5, 1F0 1, 1B0 2, transfer 5, 0B0 2.
    assert document["step_s"] == pytest.approx(0.016)
    assert document["exposed_comm_s"] == pytest.approx([0.005, 0.005])
    assert document["peak_activations"] == [1, 1]


def test_doctor_prints_its_findings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [{"part": "torch", "state": "ok", "text": "2.x"}]
    monkeypatch.setattr("pipecomm.app.doctor.examine", lambda: findings)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "torch  ok       2.x\n"
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == findings
