"""Jobs beside each other, of other users, and by other ways to start ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pipecomm  # noqa: F401 - registers the backend
from tests.patience import patient
from tests.ranks import spawn_ranks

_OTHER_USER = 65534


def _join(port: int, rank: int, size: int = 2, timeout_s: float = 30.0) -> None:
    dist.init_process_group(
        "pipecomm",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def _exchange(rank: int, value: float, count: int) -> None:
    for index in range(count):
        sent, got = torch.full((1000,), value + index), torch.zeros(1000)
        work = dist.isend(sent, 1 - rank)
        dist.recv(got, 1 - rank)
        work.wait()
        assert torch.equal(got, sent)


def _two_jobs(rank: int, size: int, store_path: str, ports: tuple[int, int]) -> str:
    """Ranks 0 and 1 are one job, 2 and 3 another, which is another user's where that can be."""
    meeting = dist.FileStore(store_path, size)
    # Loads all code, which may lie where another user cannot read it.
    dist.init_process_group("pipecomm", rank=0, world_size=1, store=dist.HashStore())
    dist.destroy_process_group()
    job, rank = divmod(rank, 2)
    _meet(meeting, "store exists", size)
    if job and os.getuid() == 0:
        os.chmod(Path(store_path).parent, 0o777)
        os.chmod(store_path, 0o666)
        os.setgid(_OTHER_USER)
        os.setuid(_OTHER_USER)
    before = _files_in_shared_places()
    _join(ports[job], rank)
    _meet(meeting, "connected", size)
    assert _files_in_shared_places() <= before
    _exchange(rank, 1000.0 * job, 200)
    dist.barrier()
    text = ""
    if job:
        dist.destroy_process_group()
        if rank == 0:
            text = _refusal(ports[0])
    _meet(meeting, "refused", size)
    if not job:
        _exchange(rank, 5000.0, 50)
        dist.destroy_process_group()
    return text


def _refusal(port: int) -> str:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        _join(port, 0)
    assert time.monotonic() - start < 30
    return str(caught.value)


def _meet(store: dist.Store, where: str, size: int) -> None:
    store.add(where, 1)
    deadline = time.monotonic() + patient(60)
    while store.add(where, 0) < size:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _files_in_shared_places() -> set[str]:
    folders = (Path("/dev/shm"), Path("/tmp"))
    return {str(path) for folder in folders for path in folder.glob("*pipecomm*")}


def test_jobs_of_two_users_on_one_host_do_not_mix_and_a_taken_port_is_refused(
    two_free_ports: tuple[int, int],
) -> None:
    texts = spawn_ranks(4, _two_jobs, two_free_ports)
    assert "in use" in texts[2]
    assert str(two_free_ports[0]) in texts[2]


@pytest.fixture
def two_free_ports() -> tuple[int, int]:
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)
    ]
    first, second = (store.port for store in stores)
    return first, second


_SCRIPT = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist
import pipecomm

def rank_main(rank, folder):
    if folder:
        dist.init_process_group(
            "pipecomm", rank=rank, world_size=2, store=dist.FileStore(folder + "/store", 2)
        )
    else:
        dist.init_process_group("pipecomm")
    got = torch.zeros(1000)
    work = dist.isend(torch.full((1000,), float(rank)), 1 - rank)
    dist.recv(got, 1 - rank)
    work.wait()
    dist.barrier()
    dist.destroy_process_group()
    if got.tolist() != [1.0 - rank] * 1000:
        sys.exit(1)

if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), "")
        sys.exit()
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=rank_main, args=(rank, sys.argv[2])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    sys.exit(any(rank.exitcode for rank in ranks))
"""


# The third way, forkserver, is that of tests/ranks.py.
@pytest.mark.parametrize("method", ["fork", "spawn", "torchrun"])
def test_ranks_may_be_started_by(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [str(script), method, str(tmp_path)]
    if method == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, str(script)]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
