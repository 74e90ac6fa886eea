"""Ranks connected through TCP on one host: strangers, damaged peers, what exit and fork leave."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from pipecomm._native import core
from pipecomm.errors import LinkTimeoutError, PeerLostError, TransportError
from pipecomm.links.rendezvous import connect
from tests.links import test_transport_faults
from tests.patience import patient
from tests.ranks import run_ranks

_CONTROL, _RECORD, _TAKEN = 1, 2, 3
_RING_WANTED, _RING_MADE = 1, 2


@pytest.fixture(autouse=True)
def _by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_TRANSPORT", "tcp")


def _listener() -> Any:
    made = core.Listener()
    made.listen_tcp("127.0.0.1")
    return made


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _token(address: str) -> bytes:
    return address.split("|")[4].encode()


def _connect_pair(listeners: list[Any]) -> list[Any]:
    addresses = [listener.address for listener in listeners]
    made: list[Any] = [None] * len(listeners)

    def join(rank: int) -> None:
        made[rank] = listeners[rank].connect(rank, addresses, timeout_s=patient(20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def _exchange(made: list[Any]) -> None:
    sent = torch.ones(4)
    made[0].send(1, [(sent.data_ptr(), "float32", (4,), (), "raw", False, -1)])
    received = made[1].receive(0)
    received.wait(20)
    assert received.payload_nbytes == 16


@pytest.mark.parametrize(
    "noise",
    [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"pipecomm" + b"\xff" * 56],
)
def test_strangers_at_the_port_neither_disturb_nor_get_in(noise: bytes) -> None:
    listeners = [_listener(), _listener()]
    before = psutil.Process().memory_info().rss
    strangers = []
    for _ in range(100):
        stranger = socket.create_connection(("127.0.0.1", _port(listeners[0].address)))
        stranger.sendall(noise)
        strangers.append(stranger)
    made = _connect_pair(listeners)
    _exchange(made)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", _port(listeners[0].address)))
    for communicator in made:
        communicator.close()
    for stranger in strangers:
        stranger.close()


def _hello(token: bytes, *, rank: int = 1, size: int = 2, text: bytes = b"") -> bytes:
    return struct.pack("<8sIiiIII32s", b"pipecomm", 3, rank, size, 0, len(text), 0, token) + text


@pytest.mark.parametrize("change", ["token", "rank", "length"])
def test_caller_who_does_not_belong_is_not_answered(change: str) -> None:
    listener, other = _listener(), _listener()
    token = b"0" * 32 if change == "token" else _token(listener.address)
    hello = bytearray(_hello(token, rank=7 if change == "rank" else 1))
    if change == "length":
        hello[24:28] = b"\xff\xff\xff\x7f"
    with socket.create_connection(("127.0.0.1", _port(listener.address))) as stranger:
        stranger.sendall(hello)
        with pytest.raises(LinkTimeoutError, match=r"no answer from rank 1 at 127\.0\.0\.1"):
            listener.connect(0, [listener.address, other.address], timeout_s=0.5)
        assert stranger.recv(100) == b""


def test_impostor_at_the_port_of_a_rank_is_found_out() -> None:
    rank_0, rank_1 = _listener(), _listener()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        fields = rank_0.address.split("|")
        fields[5] = f"127.0.0.1:{impostor.getsockname()[1]}"

        def answer() -> None:
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(_hello(b"0" * 32, rank=0))
                caller.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError, match="an answer of somebody else"):
            rank_1.connect(1, ["|".join(fields), rank_1.address], timeout_s=10)
        thread.join()


class _Peer:
    """Rank 1 of two, played by hand: knows the token and says what it likes."""

    def __init__(self) -> None:
        listener, other = _listener(), _listener()
        self._socket = socket.create_connection(("127.0.0.1", _port(listener.address)))
        self._socket.settimeout(20)
        self._socket.sendall(_hello(_token(listener.address)))
        self.communicator = listener.connect(
            0, [listener.address, other.address], timeout_s=patient(20)
        )
        self._read(64)

    def _read(self, nbytes: int) -> bytes:
        return self._socket.recv(nbytes, socket.MSG_WAITALL)

    def say(self, kind: int, body: bytes) -> None:
        self._socket.sendall(struct.pack("<II", kind, len(body)) + body)

    def say_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def control(self, kind: int, value: int = 0) -> None:
        self.say(_CONTROL, struct.pack("<IIQ", kind, 0, value))

    def hear(self) -> tuple[int, bytes]:
        kind, nbytes = struct.unpack("<II", self._read(8))
        return kind, self._read(nbytes)

    def close(self) -> None:
        self._socket.close()
        self.communicator.close()


@pytest.fixture
def peer() -> Iterator[_Peer]:
    made = _Peer()
    yield made
    made.close()


def _record_without_ring(peer: _Peer) -> None:
    peer.say(_RECORD, bytes(64))


def _unknown_frame(peer: _Peer) -> None:
    peer.say(99, b"")


def _endless_control(peer: _Peer) -> None:
    peer.say_raw(struct.pack("<II", _CONTROL, 1 << 31))


def _short_control(peer: _Peer) -> None:
    peer.say(_CONTROL, b"abc")


def _huge_ring(peer: _Peer) -> None:
    peer.control(_RING_MADE, 1 << 60)


def _position_never_reached(peer: _Peer) -> None:
    peer.control(_RING_MADE, 4096 + (1 << 20))
    peer.say(_TAKEN, struct.pack("<Q", 64))


def _record_larger_than_the_ring(peer: _Peer) -> None:
    peer.control(_RING_WANTED)
    assert peer.hear()[0] == _CONTROL
    peer.say_raw(struct.pack("<II", _RECORD, 1 << 29))


def _record_that_is_no_message(peer: _Peer) -> None:
    peer.control(_RING_WANTED)
    assert peer.hear()[0] == _CONTROL
    peer.say(_RECORD, os.urandom(200))


def _http(peer: _Peer) -> None:
    peer.say_raw(b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    "damage",
    [
        _record_without_ring,
        _unknown_frame,
        _endless_control,
        _short_control,
        _huge_ring,
        _position_never_reached,
        _record_larger_than_the_ring,
        _record_that_is_no_message,
        _http,
    ],
)
def test_damaged_peer_is_lost_and_nothing_else(
    peer: _Peer, damage: Callable[[_Peer], None]
) -> None:
    waiting = peer.communicator.receive(1)
    damage(peer)
    with pytest.raises(PeerLostError, match=r"rank 1 is lost: .*(expected|refused)"):
        waiting.wait(20)


def test_peer_that_ends_in_the_middle_of_a_frame_is_lost(peer: _Peer) -> None:
    waiting = peer.communicator.receive(1)
    peer.control(_RING_WANTED)
    peer.hear()
    peer.say_raw(struct.pack("<II", _RECORD, 1000) + bytes(10))
    peer._socket.close()
    with pytest.raises(PeerLostError, match="rank 1 is lost: its process ended without a goodbye"):
        waiting.wait(20)


def test_closing_does_not_wait_long_for_a_peer_that_does_not_read(peer: _Peer) -> None:
    tensor = torch.ones(900_000)
    sent = peer.communicator.send(
        1, [(tensor.data_ptr(), "float32", (900_000,), (), "raw", False, -1)]
    )
    peer.control(_RING_MADE, 4096 + (4 << 20))
    sent.wait(20)
    started = time.monotonic()
    peer.communicator.close()
    assert time.monotonic() - started < 15


_SEND_AND_EXIT = """
import ctypes, os, sys, time
import torch, torch.distributed as dist
from pipecomm.links.rendezvous import connect
rank = int(sys.argv[1])
made = connect(dist.FileStore(sys.argv[2], 2), rank, 2, name="exit", timeout_s=30)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # nothing closes it
if rank == 0:
    tensor = torch.arange(900_000.0)
    made.send(1, [(tensor.data_ptr(), "float32", (900_000,), (), "raw", False, -1)]).wait(20)
    if os.environ["HOW"] == "fork" and os.fork() == 0:
        sys.exit(0)
else:
    time.sleep(1)
    received = made.receive(0)
    received.wait(20)
    print(received.payload_nbytes)
    try:
        made.receive(0).wait(20)
    except Exception as error:
        print(error)
"""


@pytest.mark.parametrize("how", ["return", "fork"])
def test_message_of_a_sender_that_ends_after_wait_arrives(how: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOW": how, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SEND_AND_EXIT, str(rank), str(tmp_path / "s")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=patient(60))[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    output = outputs[1]
    assert output.startswith("3600000\n")
    assert "rank 0 is lost: its process ended without a goodbye (127.0.0.1:" in output


def _outcomes(size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    outcomes = run_ranks(size, case, *args, env={"PIPECOMM_TRANSPORT": "tcp"})
    return [value for kind, value in outcomes if kind == "ok"]


def test_survivors_of_a_rank_killed_in_flight_raise_and_name_it() -> None:
    outcomes = _outcomes(3, test_transport_faults._send_and_die, "in flight")
    assert len(outcomes) == 2
    for errors, seconds in outcomes:
        assert "rank 1 is lost" in errors[0]
        assert seconds < test_transport_faults.NOTICED_S


def _return_after_wait(rank: int, size: int, store_path: str) -> int:
    made = connect(dist.FileStore(store_path, size), rank, size, name="exit", timeout_s=30)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # nothing closes it
    if rank == 0:
        tensor = torch.arange(900_000.0)
        made.send(1, [(tensor.data_ptr(), "float32", (900_000,), (), "raw", False, -1)]).wait(20)
        return 0
    received = made.receive(0)
    received.wait(20)
    return int(received.payload_nbytes)


def test_message_of_a_multiprocessing_child_that_returns_after_wait_arrives() -> None:
    assert _outcomes(2, _return_after_wait) == [0, 3_600_000]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_does_not_keep_its_dead_parent_alive_for_the_peers() -> None:
    (seconds,) = _outcomes(2, test_transport_faults._fork_and_die)
    assert seconds < 4


def test_use_in_a_forked_child_says_how_to_start_processes() -> None:
    texts = _outcomes(2, test_transport_faults._use_after_fork)
    assert len(texts) == 2
    assert all("spawn" in text for text in texts)


def test_open_files_and_threads_stay_constant_over_many_groups() -> None:
    process = psutil.Process()
    counts = []
    for _ in range(8):
        made = _connect_pair([_listener(), _listener()])
        _exchange(made)
        for communicator in made:
            communicator.close()
        counts.append((process.num_fds(), process.num_threads()))
    assert counts[-1] == counts[1]
