"""What the other ranks learn, and what stays behind, when processes die or are interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from pipecomm._native import core
from pipecomm.codecs.codec import Codec
from pipecomm.errors import LinkTimeoutError, PeerLostError, TransportError
from pipecomm.links.generation import Seat
from pipecomm.links.limits import FlowLimits
from pipecomm.links.link import Links
from pipecomm.links.rendezvous import connect
from tests.kills import names_now, names_that_stay
from tests.patience import patient
from tests.ranks import run_ranks, spawn_ranks

RAW = Codec("raw")
NOTICED_S = 10.0  # far more than the two promised: a loaded machine is not a fault


def _links(rank: int, size: int, store_path: str) -> Links:
    return Links.connect(dist.FileStore(store_path, size), rank, size, timeout_s=patient(30))


def _send_and_die(rank: int, size: int, store_path: str, when: str) -> Any:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    large = torch.ones(16_000_000)
    if rank == 1:
        if when == "in flight":
            links.send(0, [large], direction="backward", microbatch=0, codec=RAW)
            links.send(2, [large], direction="forward", microbatch=0, codec=RAW)
            time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    neighbour = {0: "backward", 2: "forward"}[rank]
    back = {0: "forward", 2: "backward"}[rank]
    started = time.monotonic()
    errors = []
    try:
        links.send(1, [large], direction=back, microbatch=0, codec=RAW)  # type: ignore[arg-type]
        for microbatch in range(3):
            links.receive(1, direction=neighbour, microbatch=microbatch).wait()  # type: ignore[arg-type]
    except PeerLostError as error:
        errors.append(str(error))
    return errors, time.monotonic() - started


@pytest.mark.parametrize("when", ["before anything is sent", "in flight"])
def test_survivors_of_a_killed_rank_raise_and_name_it(when: str) -> None:
    outcomes = run_ranks(3, _send_and_die, when, timeout_s=60)
    assert outcomes[1] == ("died", -signal.SIGKILL)
    for rank in (0, 2):
        kind, value = outcomes[rank]
        assert kind == "ok", value
        errors, seconds = value
        assert "rank 1 is lost" in errors[0]
        assert f"rank {rank}" in errors[0]
        assert seconds < NOTICED_S


def _gives_up_while_connecting(rank: int, size: int, store_path: str) -> str:
    """Rank 2 publishes its address and does not come; rank 1 waits for it less long than rank 0."""
    store = dist.FileStore(store_path, size)
    if rank == 2:
        listener, seat = core.Listener(), Seat(store, rank)
        store.set(seat.key("address/2"), listener.address)
        store.set(seat.key("settings/2"), FlowLimits().settings)
        store.wait(["told"])
        return ""
    with pytest.raises((PeerLostError, LinkTimeoutError)) as caught:
        connect(store, rank, size, name="test", timeout_s=2 if rank == 1 else 30)
    if rank == 1:
        os._exit(1)
    store.set("told", "")
    return str(caught.value)


def test_rank_that_gave_up_while_connecting_is_named_with_the_one_that_was_missing() -> None:
    kind, text = run_ranks(3, _gives_up_while_connecting, timeout_s=60)[0]
    assert kind == "ok", text
    assert "rank 1 ended while connecting; also gone, or not there yet: rank 2 (rank 0," in text


def _exit_after_send(rank: int, size: int, store_path: str, count: int) -> Any:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    if rank == 0:
        numbers = torch.arange(float(count))
        links.send(1, [numbers], direction="forward", microbatch=0, codec=RAW).wait()
        os._exit(0)
    if count < 1000:
        time.sleep(1.0)
    (got,) = links.receive(0, direction="forward", microbatch=0).wait()
    assert got is not None
    return torch.equal(got, torch.arange(float(count)))


@pytest.mark.parametrize("count", [4, 8_000_000])
def test_message_of_a_sender_that_exits_after_wait_arrives(count: int) -> None:
    assert run_ranks(2, _exit_after_send, count, timeout_s=60)[1] == ("ok", True)


def _pause(rank: int, size: int, store_path: str) -> float:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        links.send(1, [torch.ones(1)], direction="forward", microbatch=0, codec=RAW).wait()
        links.receive(1, direction="backward", microbatch=0).wait()
        return 0.0
    started = time.monotonic()
    parent = psutil.Process(os.getppid())
    stopped = [child for child in parent.children() if child.status() == psutil.STATUS_STOPPED]
    while not stopped:
        time.sleep(0.02)
        stopped = [child for child in parent.children() if child.status() == psutil.STATUS_STOPPED]
    threading.Timer(3.0, stopped[0].resume).start()
    links.receive(0, direction="forward", microbatch=0).wait()
    links.send(0, [torch.ones(1)], direction="backward", microbatch=0, codec=RAW).wait()
    return time.monotonic() - started


def test_paused_peer_is_not_taken_for_dead() -> None:
    assert spawn_ranks(2, _pause, timeout_s=60)[1] >= 2.9


def _interrupted(rank: int, size: int, store_path: str) -> Any:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    started = time.monotonic()
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            links.receive(1, direction="backward", microbatch=0).wait()
        seconds = time.monotonic() - started
        links.close()
        return seconds
    with pytest.raises(TransportError, match="rank 0 has left"):
        links.receive(0, direction="forward", microbatch=0).wait()
    return time.monotonic() - started


def test_keyboard_interrupt_ends_a_blocked_receive_and_the_peer_learns_of_it() -> None:
    own, peers = spawn_ranks(2, _interrupted, timeout_s=60)
    assert own < 2.5
    assert peers < NOTICED_S


def _fork_and_die(rank: int, size: int, store_path: str) -> Any:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(5)  # outlives its parent, with the parent's descriptors
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        links.receive(1, direction="backward", microbatch=0).wait()
    return time.monotonic() - started


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_does_not_keep_its_dead_parent_alive_for_the_peers() -> None:
    outcome = run_ranks(2, _fork_and_die, timeout_s=60)[0]
    assert outcome[0] == "ok", outcome[1]
    assert outcome[1] < 4


def _use_after_fork(rank: int, size: int, store_path: str) -> str:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"no error"
        try:
            links.begin_step(2)
        except TransportError as error:
            text = str(error).encode()
        os.write(writer, text)
        os._exit(0)
    os.waitpid(child, 0)
    links.begin_step(2)
    return os.read(reader, 4096).decode()


def test_use_in_a_forked_child_says_how_to_start_processes() -> None:
    for text in spawn_ranks(2, _use_after_fork, timeout_s=60):
        assert "spawn" in text


def _exchange_and_die(rank: int, size: int, store_path: str) -> None:
    links = _links(rank, size, store_path)
    links.begin_step(1)
    links.send(1 - rank, [torch.ones(100_000)], direction="forward", microbatch=0, codec=RAW)
    links.receive(1 - rank, direction="forward", microbatch=0).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_jobs_leave_nothing_and_the_next_one_works() -> None:
    before = names_now()
    for _ in range(3):
        outcomes = run_ranks(2, _exchange_and_die, timeout_s=60)
        assert ("died", -signal.SIGKILL) in outcomes
    assert spawn_ranks(2, _interrupted, timeout_s=60)
    assert not names_that_stay(before)


@pytest.mark.parametrize("noise", [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)])
def test_strangers_at_the_socket_neither_disturb_nor_get_in(noise: bytes) -> None:
    import socket

    listeners = [core.Listener() for _ in range(2)]
    addresses = [listener.address for listener in listeners]
    strangers = []
    for _ in range(100):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + addresses[0].split("|")[3])
        if noise:
            stranger.send(noise)
        strangers.append(stranger)
    made: dict[int, Any] = {}

    def join(rank: int) -> None:
        made[rank] = listeners[rank].connect(rank, addresses, timeout_s=patient(20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent = torch.ones(4)
    made[0].send(1, [(sent.data_ptr(), "float32", (4,), (), "raw", False, -1)])
    received = made[1].receive(0)
    received.wait(20)
    assert received.payload_nbytes == 16
    for rank in range(2):
        made[rank].close()
    for stranger in strangers:
        stranger.close()


def test_caller_who_does_not_know_the_token_is_not_answered() -> None:
    import socket

    listener = core.Listener()
    own, other = listener.address, core.Listener().address
    hello = b"pipecomm" + (1).to_bytes(4, "little") + (1).to_bytes(4, "little")
    hello += (2).to_bytes(4, "little") + bytes(12) + b"0" * 32
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect("\0" + own.split("|")[3])
        stranger.send(hello)
        with pytest.raises(LinkTimeoutError, match="no answer from rank 1"):
            listener.connect(0, [own, other], timeout_s=0.3)
        assert stranger.recv(100) == b""


def test_missing_rank_is_named_by_the_rendezvous() -> None:
    with pytest.raises(LinkTimeoutError, match=r"rank 1, 2.*rank 0"):
        connect(dist.HashStore(), 0, 3, name="test", timeout_s=0.2)


def test_open_files_and_memory_stay_constant_over_many_groups() -> None:
    process = psutil.Process()
    _make_and_close_pair()
    before = process.num_fds()
    for _ in range(30):
        _make_and_close_pair()
    assert process.num_fds() == before


def _make_and_close_pair() -> None:
    store = dist.HashStore()
    made: dict[int, Any] = {}

    def join(rank: int) -> None:
        made[rank] = connect(store, rank, 2, name="test", timeout_s=20)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensor = torch.ones(10)
    made[0].send(1, [(tensor.data_ptr(), "float32", (10,), (), "raw", False, -1)])
    made[1].receive(0).wait(20)
    for rank in range(2):
        made[rank].close()


# Each entry: what the two ranks are wrapped in, so that they see another machine than the test.
