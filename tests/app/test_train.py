"""`pipecomm train` with real ranks: what it prints and writes, and how it ends when a rank dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipecomm.app.rank import JobRank
from pipecomm.app.train import TrainOptions, _by_boundary, _choose_link, _learning_rate
from pipecomm.links.link import LinkEmulation
from pipecomm.schedule import Placement
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent.parent
# Generous: a loaded machine needs seconds to import torch in every rank.
LIMIT_S = 120.0
TINY = [
    "--layers=4",
    "--width=16",
    "--heads=2",
    "--sequence-length=16",
    "--batch-size=4",
    "--microbatches=4",
    "--held-out-batches=2",
]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pipecomm", "train", *TINY, *words]


def environment(**changes: str) -> dict[str, str]:
    left = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**left, "PYTHONPATH": str(ROOT), **changes}


def start(folder: Path, words: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, words: Sequence[str], **variables: str) -> tuple[int, str, str]:
    with start(folder, words, **variables) as process:
        try:
            stdout, stderr = process.communicate(timeout=patient(LIMIT_S))
        finally:
            process.kill()
    return process.returncode, stdout, stderr


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the launcher's children, in the order of their ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    with contextlib.suppress(OSError):
        return [int(pid) for pid in children.read_text().split()]
    return []


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + patient(limit_s)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_compared_training_prints_a_table_and_writes_what_it_says(tmp_path: Path) -> None:
    words = ["--compare", "--steps=12", "--link-mbps=200", "--link-latency-ms=0.5", "--out=a/b"]
    code, stdout, stderr = run(tmp_path, command(*words))
    assert (code, "Traceback" in stderr) == (0, False), stderr
    assert "12 steps, emulated link: 200 Mbit/s, 0.5 ms" in stdout
    assert "int4+int8" in stdout
    progress = [line for line in stderr.splitlines() if "tokens/s" in line]
    assert all("loss 5." in line and "(emulated)" in line for line in progress)
    files = re.findall(r"^wrote (.+)$", stdout, re.MULTILINE)
    assert sorted(files) == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("a/b/*"))
    check_files([tmp_path / file for file in files])


def check_files(files: Sequence[Path]) -> None:
    pictures = [path for path in files if path.suffix == ".png"]
    assert len(pictures) == 2
    assert all(path.read_bytes().startswith(PNG_MAGIC) for path in pictures)
    traces = [path for path in files if path.suffix == ".json"]
    assert len(traces) == 2
    for trace in traces:
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert {"0F0", "0B3", "1F0", "1B3"} <= names


def test_json_of_four_ranks_is_one_document_and_all_else_is_on_stderr(tmp_path: Path) -> None:
    words = ["--compare", "--stages=4", "--steps=8", "--json", "--learning-rate=0.01"]
    # Messages of 4 KiB, the smallest that are encoded.
    words.append("--sequence-length=64")
    # Every rank warns on stdout and on stderr.
    (tmp_path / "warning").mkdir()
    (tmp_path / "warning" / "sitecustomize.py").write_text(
        "import os, sys\nif 'RANK' in os.environ: print('on stdout'); print('x', file=sys.stderr)\n"
    )
    path = f"{tmp_path / 'warning'}{os.pathsep}{ROOT}"
    code, stdout, stderr = run(tmp_path, command(*words), PYTHONPATH=path)
    assert code == 0, stderr
    document = json.loads(stdout)
    raw, quantized = document["runs"]
    assert all(f"[rank {rank}] on stdout" in stderr for rank in range(4))
    assert document["link"]["is_emulated"] is False
    assert raw["first_loss"] == pytest.approx(quantized["first_loss"], rel=0.01)
    assert raw["train_loss"] < raw["first_loss"]
    assert document["compared"]["held_out_loss_change"] == pytest.approx(0, abs=0.02)
    # 3 boundaries, 2 directions, 8 steps, 4 x 64 positions of 16 float32 values.
    assert raw["payload_nbytes_sent"] == quantized["payload_nbytes_sent"] == 3 * 2 * 8 * 4 * 64 * 64
    assert 0.1 < document["compared"]["wire_nbytes_ratio"] < 0.6
    for run_ in document["runs"]:
        assert 0 <= run_["bubble"] <= 1
        last = run_["last_step"]
        assert 0 < last["planned_step_s"] <= max(rank["step_s"] for rank in last["ranks"])
        assert [rank["peak_activations"] for rank in last["ranks"]] == [4, 3, 2, 1]
        assert 0 <= run_["exposed_comm_s"] <= run_["step_s"]


def test_schedule_that_was_chosen_is_named(tmp_path: Path) -> None:
    words = ["--schedule=auto", "--stages=3", "--steps=4", "--json"]
    code, stdout, stderr = run(tmp_path, command(*words))
    assert code == 0, stderr
    (result,) = json.loads(stdout)["runs"]
    # Whatever this machine's times make the best of those that keep no more than 1F1B.
    assert result["schedule"] in ("1f1b", "zb-h1", "planned")


def test_trainings_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    words = command("--steps=3", "--json", "--stages=1", "--out")
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(start(tmp_path, [*words, f"out{k}"])) for k in range(2)]
        results = [
            (process.communicate(timeout=patient(LIMIT_S)), process.returncode)
            for process in started
        ]
    losses = {json.loads(stdout)["runs"][0]["held_out_loss"] for (stdout, _), _ in results}
    assert [code for _, code in results] == [0] * 2
    assert len(losses) == 1


def test_ranks_of_several_stages_train_the_same_model(tmp_path: Path) -> None:
    """Four stages on two ranks, as on four: the same weights, batches and losses."""
    documents = []
    for words in (
        ["--stages=2", "--stages-per-rank=2", "--schedule=interleaved", "--codec=int8"],
        ["--stages=4", "--codec=int8"],
    ):
        more = ["--steps=3", "--json", "--out"]
        code, stdout, stderr = run(tmp_path, command(*words, *more, words[0][2:]))
        assert code == 0, stderr
        documents.append(json.loads(stdout)["runs"][0])
    two, four = documents
    assert two["codecs"] == four["codecs"] == ["int8"] * 3
    assert two["grad_codecs"] == four["grad_codecs"] == ["raw"] * 3
    assert two["held_out_loss"] == pytest.approx(four["held_out_loss"], rel=1e-5)
    assert two["payload_nbytes_sent"] == four["payload_nbytes_sent"]


def test_asynchronous_schedule_trains_with_updates_within_its_steps(tmp_path: Path) -> None:
    words = ["--schedule=pipedream", "--steps=3", "--json", "--out=here"]
    code, stdout, stderr = run(tmp_path, command(*words))
    assert code == 0, stderr
    (trained,) = json.loads(stdout)["runs"]
    assert math.isfinite(trained["held_out_loss"])
    events = json.loads((tmp_path / "here" / "timeline-raw.json").read_text())["traceEvents"]
    assert {"0U0", "0U1", "1U0", "1U1"} <= {event["name"] for event in events}


def test_codecs_are_told_by_boundary_with_raw_inside_a_rank() -> None:
    in_use = [{"forward": "int4, int8", "backward": "fp8"}, {"forward": "nf4"}]
    looped, down = Placement.looped(4, 2), Placement((0, 0, 1))
    assert _by_boundary(in_use, looped, "forward") == ["int4", "nf4", "int8"]
    assert _by_boundary([{"forward": "int4"}, {}], down, "forward") == ["raw", "int4"]


def test_torchrun_starts_the_same_training(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "pipecomm", "train", *TINY, "--steps=3", "--json"]
    code, stdout, stderr = run(tmp_path, [*torchrun, *words])
    assert code == 0, stderr
    document = json.loads(stdout)
    assert document["num_steps"] == 3
    assert document["runs"][0]["wire_nbytes_sent"] > 0


def test_wrong_world_size_is_refused_on_every_rank(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(start(tmp_path, command("--stages=3"), RANK=str(rank), **variables))
            for rank in range(2)
        ]
        outputs = [
            (process.communicate(timeout=patient(LIMIT_S)), process.returncode) for process in ranks
        ]
    for rank, ((_, stderr), code) in enumerate(outputs):
        assert code == 2
        assert f"[rank {rank}] pipecomm: error: --stages: expected" in stderr
        assert "got 3" in stderr


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], str]]]:
    """An endless training, and a way to read its stderr up to a line with a text."""
    with start(folder, command("--steps=1000000", "--link-latency-ms=1")) as launcher:

        def read_until(text: str) -> str:
            assert launcher.stderr is not None
            return next(line for line in launcher.stderr if text in line)

        try:
            yield launcher, read_until
        finally:
            pids = ranks_of(launcher)
            launcher.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "rank"), [("start", 1), ("join", 0), ("steps", 0), ("steps", 1)]
)
def test_killed_rank_ends_the_other_and_is_named(tmp_path: Path, moment: str, rank: int) -> None:
    with training(tmp_path) as (launcher, read_until):
        wait_until(lambda: len(ranks_of(launcher)) == 2)
        pids = ranks_of(launcher)
        if moment == "join":
            wait_until(lambda: "libtorch" in Path(f"/proc/{pids[rank]}/maps").read_text())
        if moment == "steps":
            read_until("step 1/")
        os.kill(pids[rank], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), limit_s=8)
        _, stderr = launcher.communicate(timeout=patient(LIMIT_S))
        assert launcher.returncode == 128 + signal.SIGKILL
        assert f"rank {rank} of 2 (process {pids[rank]}) was lost: killed by SIGKILL" in stderr
        if moment == "steps":
            other = [x for x in stderr.splitlines() if x.startswith(f"[rank {1 - rank}]")]
            assert any(f"rank {rank}" in line for line in other), stderr


def test_failing_rank_shows_its_own_error_and_the_job_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '0':\n"
        "    import pipecomm.app.train\n"
        "    def boom(self, x): raise ValueError('boom')\n"
        "    pipecomm.app.train.GptStage.forward = boom\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code, stdout, stderr = run(tmp_path, command("--steps=3", "--json"), PYTHONPATH=path)
    assert code == 1
    assert "rank 0 of 2" in json.loads(stdout)["error"]
    for rank in range(2):
        own = [line for line in stderr.splitlines() if line.startswith(f"[rank {rank}]")]
        assert any("boom" in line for line in own), stderr


def options(**changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "stages": 2,
        "microbatches": 4,
        "batch_size": 8,
        "steps": 100,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "sequence_length": 16,
        "learning_rate": 0.5,
        "seed": 0,
        "schedule": "1f1b",
        "codec": "int4",
        "grad_codec": "int8",
        "compare": True,
        "link_mbps": 0.0,
        "link_latency_ms": 0.0,
        "data": None,
        "held_out_batches": 1,
        "timeout_s": 10.0,
        "out": Path("out"),
    }
    return TrainOptions(**{**values, **changes})


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [_learning_rate(options(), step) for step in range(101)]
    assert rates[0] == pytest.approx(0.5 / 20)
    assert max(rates) == pytest.approx(0.5, rel=0.1)
    assert rates.index(max(rates)) == 19
    assert rates[100] == pytest.approx(0)


def test_link_is_real_unless_one_is_asked_for() -> None:
    me = JobRank(0, 2)
    assert _choose_link(options(), me) is None
    assert _choose_link(options(link_mbps=5.0), me) == LinkEmulation(5.0, 0.0)
    assert _choose_link(options(link_latency_ms=2.0), me) == LinkEmulation(0.0, 2.0)
    assert _choose_link(options(link_mbps=5.0), JobRank(0, 1)) is None


def test_automatic_link_takes_twice_as_long_as_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipecomm.app.train._compute_s", lambda *args: 0.001)
    monkeypatch.setattr("pipecomm.app.train._gather", lambda value: [value, 0.002])
    emulation = _choose_link(options(link_mbps=-1.0), JobRank(0, 2))
    assert emulation is not None
    # 2 rows x 16 positions x 16 float32 values in 4 ms.
    assert emulation.mbps == pytest.approx(2 * 16 * 16 * 32 / 4000, rel=0.05)
