"""PIPECOMM_AUTOLOAD: scripts that never heard of pipecomm, run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pipecomm_autoload
from pipecomm.drop_in import autoload
from tests.patience import patient

_SCRIPT = """
import os
import torch
import torch.distributed as dist

def exchange(group=None):
    sent, got = torch.full((4,), float(dist.get_rank())), torch.zeros(4)
    work = dist.isend(sent, 1 - dist.get_rank(), group)
    dist.recv(got, 1 - dist.get_rank(), group)
    work.wait()
    assert got.tolist() == [1.0 - dist.get_rank()] * 4
    dist.all_reduce(sent, group=group)
    assert sent.tolist() == [1.0] * 4
    kind = type((group or dist.group.WORLD)._get_backend(torch.device("cpu"))).__name__
    return f"{dist.get_backend(group)} {dist.get_backend_config(group)} {kind}"

for index, name in enumerate(["gloo", None, "cpu:gloo", "fake"]):
    store = dist.FileStore(f"store{index}", 2)
    rank = int(os.environ["RANK"])
    if name == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore
        store = FakeStore()
    dist.init_process_group(name, rank=rank, world_size=2, store=store)
    if name == "fake":
        print(dist.get_backend(), dist.get_backend_config())
    else:
        print(exchange(), "|", exchange(dist.new_group([0, 1])))
        print(exchange(dist.new_group([0, 1], backend="gloo")))
    if name == "gloo":
        dist.monitored_barrier()
    dist.destroy_process_group()
"""


def _run(code: str, folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    kept = {name: text for name, text in os.environ.items() if "AUTOLOAD" not in name}
    return subprocess.Popen(
        [sys.executable, "-W", "error", *flags, "-c", code],
        cwd=folder,
        env={**kept, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=patient(120))
    assert process.returncode == 0, err
    return out, err


def test_entry_point_is_installed() -> None:
    names = {point.name: point.value for point in entry_points(group="torch.backends")}
    assert names["pipecomm"] == "pipecomm_autoload:load"


def test_program_that_imports_torch_gets_nothing_else_unless_it_asks(tmp_path: Path) -> None:
    look = "import sys, torch; print('pipecomm' in sys.modules)"
    off = _run(look, tmp_path)
    first = _run("import pipecomm\n" + look, tmp_path, PIPECOMM_AUTOLOAD="1")
    assert _finish(off) == ("False\n", "")
    assert _finish(first) == ("True\n", "")


@pytest.mark.parametrize("value", ["", "1"])
def test_torch_is_imported_where_only_our_metadata_is_on_the_path(
    value: str, tmp_path: Path
) -> None:
    """As when the folder of an environment with an editable install is on PYTHONPATH: -S."""
    folders = {str(Path(module.__file__ or "").parents[1]) for module in (torch, pytest)}
    looking = _run(
        "import torch; print(torch.ones(1).sum().item())",
        tmp_path,
        "-S",
        PYTHONPATH=os.pathsep.join(folders),
        PIPECOMM_AUTOLOAD=value,
    )
    out, err = _finish(looking)
    assert out == "1.0\n"
    assert err.count("\n") == bool(value)
    assert ("PIPECOMM_AUTOLOAD has no effect: No module named 'pipecomm'" in err) == bool(value)


def _load(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """What torch calls, where pipecomm cannot be imported."""
    monkeypatch.setenv("PIPECOMM_AUTOLOAD", value)
    monkeypatch.setitem(sys.modules, "pipecomm", None)
    pipecomm_autoload.load()


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_imported_when_off(
    value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _load(monkeypatch, value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("value", "text"), [("yes", "0 or 1; got 'yes'"), ("1", "import of pipe")])
def test_what_goes_wrong_is_one_line_and_no_error(
    value: str, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _load(monkeypatch, value)
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "PIPECOMM_AUTOLOAD has no effect" in err
    assert text in err


@pytest.fixture(scope="module")
def script_outputs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("stores")
    processes = [_run(_SCRIPT, folder, PIPECOMM_AUTOLOAD="1", RANK=str(rank)) for rank in range(2)]
    return [_finish(process) for process in processes]


def test_unchanged_script_gets_pipecomm_where_it_asks_for_gloo(
    script_outputs: list[tuple[str, str]],
) -> None:
    for out, _ in script_outputs:
        lines = out.splitlines()
        # Without an accelerator the whole name is replaced.
        everywhere = "cpu:pipecomm,cuda:pipecomm PipecommBackend"
        on_cpu = "cpu:pipecomm PipecommBackend"
        for index, asked, got in ((0, "gloo", everywhere), (2, "undefined", everywhere)):
            assert lines[index] == f"{asked} {got} | {asked} {got}"
        assert lines[4] == f"cpu:gloo {on_cpu} | cpu:gloo {on_cpu}"
        for index in (1, 3, 5):
            assert lines[index] == f"gloo {everywhere}"
        assert "pipecomm" not in lines[6]


def test_rank_0_says_what_has_been_replaced(script_outputs: list[tuple[str, str]]) -> None:
    (_, err_0), (_, err_1) = script_outputs
    assert [line for line in err_0.splitlines() if "PIPECOMM_AUTOLOAD=1" in line] == [
        "PIPECOMM_AUTOLOAD=1: 'gloo' process groups are 'pipecomm'",
        "PIPECOMM_AUTOLOAD=1: 'undefined' process groups are 'pipecomm'",
        "PIPECOMM_AUTOLOAD=1: 'cpu:gloo' process groups are 'cpu:pipecomm'",
    ]
    assert "PIPECOMM_AUTOLOAD" not in err_1


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("gloo", "pipecomm"),
        ("undefined", "pipecomm"),
        ("cpu:gloo", "cpu:pipecomm"),
        ("cpu:gloo,cuda:nccl", "cpu:pipecomm,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:pipecomm"),
        ("nccl", "nccl"),
        ("pipecomm", "pipecomm"),
        ("cpu:mpi,cuda:gloo", "cpu:mpi,cuda:gloo"),
    ],
)
def test_only_the_cpus_gloo_is_replaced(asked: str, given: str) -> None:
    assert autoload._replacement(dist.Backend(asked)) == given


def test_other_devices_keep_a_plain_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert autoload._replacement(dist.Backend("gloo")) == "cpu:pipecomm,cuda:gloo"
