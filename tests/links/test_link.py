"""Links between stages: what arrives, in which order, and what is told when it does not."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomm.codecs.codec import Codec
from pipecomm.errors import (
    ConfigError,
    CudaError,
    LinkTimeoutError,
    NotBuiltError,
    StageFailedError,
    TransportError,
)
from pipecomm.links.link import LinkCounters, LinkEmulation, Links
from pipecomm.memory.pool import MemoryPool, default_pool
from tests.patience import patient

RAW = Codec("raw")


class Pair:
    """Two ranks inside this process."""

    def __init__(
        self,
        emulation: LinkEmulation | None = None,
        timeout_s: float = 20.0,
        pool: MemoryPool | None = None,
    ) -> None:
        self.pool = pool or default_pool()
        store = dist.HashStore()
        made: dict[int, Links] = {}

        def connect(rank: int) -> None:
            made[rank] = Links.connect(
                store, rank, 2, timeout_s=timeout_s, emulation=emulation, pool=self.pool
            )

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.low, self.high = made[0], made[1]
        self.begin_step(1)

    def begin_step(self, step: int) -> None:
        self.low.begin_step(step)
        self.high.begin_step(step)

    def forward(self, tensors: list[Any], codec: Codec = RAW, microbatch: int = 0) -> list[Any]:
        self.low.send(1, tensors, direction="forward", microbatch=microbatch, codec=codec)
        return self.high.receive(0, direction="forward", microbatch=microbatch).wait()

    def close(self) -> None:
        self.low.close()
        self.high.close()


@pytest.fixture
def pair() -> Any:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.tensor(2.5),
        torch.zeros(2, 0, 5),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(7).to(torch.float16),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.arange(16, dtype=torch.int32).view(4, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 6).expand(4, 6),
        torch.randn(10)[::2],
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tuple(tensor.stride())}",
)
def test_tensor_sent_raw_arrives_bit_for_bit(pair: Pair, tensor: torch.Tensor) -> None:
    (got,) = pair.forward([tensor])
    assert got.shape == tensor.shape
    assert got.dtype == tensor.dtype
    sent = tensor.resolve_conj().resolve_neg().contiguous()
    assert torch.equal(_bits(got), _bits(sent))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_only_floats_go_through_the_codec(pair: Pair, codec: str) -> None:
    floats = torch.randn(4, 640, generator=torch.Generator().manual_seed(0))
    others = [torch.arange(64), torch.tensor([True] * 64), torch.arange(64, dtype=torch.uint8)]
    got, *rest = pair.forward([floats, *others], Codec(codec))
    assert not torch.equal(got, floats)
    relative = (got - floats).norm() / floats.norm()
    assert relative < {"int8": 0.01, "int4": 0.1}[codec]
    for before, after in zip(others, rest, strict=True):
        assert torch.equal(before, after)


def test_requires_grad_travels_and_the_receiver_gets_a_leaf(pair: Pair) -> None:
    inner = torch.ones(3, requires_grad=True) * 2
    got_inner, got_plain = pair.forward([inner, torch.ones(3)])
    assert got_inner.requires_grad
    assert got_inner.is_leaf
    assert not got_plain.requires_grad


def test_absent_gradient_arrives_as_none_in_its_place(pair: Pair) -> None:
    first, second, third = pair.forward([torch.ones(2), None, torch.zeros(1)])
    assert torch.equal(first, torch.ones(2))
    assert second is None
    assert torch.equal(third, torch.zeros(1))


def test_message_dropped_by_its_sender_still_arrives(pair: Pair) -> None:
    for microbatch in range(6):
        pair.low.send(
            1,
            [torch.full((100_000,), float(microbatch))],
            direction="forward",
            microbatch=microbatch,
            codec=RAW,
        )
    gc.collect()
    noise = [torch.full((100_000,), -1.0) for _ in range(8)]
    for microbatch in range(6):
        (got,) = pair.high.receive(0, direction="forward", microbatch=microbatch).wait()
        assert torch.equal(got, torch.full((100_000,), float(microbatch)))
    del noise


def test_tensor_written_after_wait_does_not_change_what_arrives(pair: Pair) -> None:
    tensor = torch.ones(1000)
    pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW).wait()
    tensor.fill_(7)
    (got,) = pair.high.receive(0, direction="forward", microbatch=0).wait()
    assert torch.equal(got, torch.ones(1000))


def test_tensors_are_let_go_once_they_have_left(pair: Pair) -> None:
    memory = bytearray(4000)
    owner = weakref.ref(array := array_of(memory))
    tensor = torch.frombuffer(array, dtype=torch.float32)
    del array
    transfer = pair.low.send(1, [tensor], direction="forward", microbatch=0, codec=RAW)
    del tensor
    transfer.wait()
    assert owner() is None


def array_of(memory: bytearray) -> Any:
    import array

    return array.array("B", memory)


def test_received_memory_goes_back_to_the_pool(pair: Pair) -> None:
    pair.forward([torch.ones(50_000)])
    gc.collect()
    before = default_pool().stats()
    for microbatch in range(20):
        pair.forward([torch.ones(50_000)], microbatch=microbatch)
    gc.collect()
    after = default_pool().stats()
    assert after.live_nbytes == before.live_nbytes
    assert after.num_upstream_calls == before.num_upstream_calls


def test_microbatches_and_directions_are_kept_apart(pair: Pair) -> None:
    for microbatch in (2, 0, 1):
        tensor = torch.full((3,), float(microbatch))
        pair.low.send(1, [tensor], direction="forward", microbatch=microbatch, codec=RAW)
        pair.high.send(0, [-tensor], direction="backward", microbatch=microbatch, codec=RAW)
    for microbatch in range(3):
        (up,) = pair.high.receive(0, direction="forward", microbatch=microbatch).wait()
        (down,) = pair.low.receive(1, direction="backward", microbatch=microbatch).wait()
        assert up[0] == microbatch
        assert down[0] == -microbatch


def test_stages_are_kept_apart_whatever_the_order(pair: Pair) -> None:
    """Two boundaries between the same ranks: equal shapes would be swapped without a word."""
    sends = [
        pair.low.send(
            1, [torch.full((4,), float(stage))], direction="forward", microbatch=0, stage=stage,
            codec=RAW,
        )
        for stage in (1, 3)
    ]  # fmt: skip
    receives = {
        stage: pair.high.receive(0, direction="forward", microbatch=0, stage=stage)
        for stage in (3, 1)
    }
    for stage, receive in receives.items():
        (got,) = receive.wait()
        assert got.tolist() == [stage] * 4
    for send in sends:
        send.wait()


def test_timeout_names_the_stage() -> None:
    pair = Pair(timeout_s=0.2)
    with pytest.raises(LinkTimeoutError, match="forward, stage 3, microbatch 0"):
        pair.high.receive(0, direction="forward", microbatch=0, stage=3).wait()
    pair.close()


def test_leftovers_of_a_step_are_not_taken_for_the_next(pair: Pair) -> None:
    pair.low.send(1, [torch.zeros(4)], direction="forward", microbatch=0, codec=RAW)
    pair.begin_step(2)
    (got,) = pair.forward([torch.ones(4)])
    assert torch.equal(got, torch.ones(4))


def test_abort_raises_at_the_peer_and_the_next_step_works(pair: Pair) -> None:
    waiting = pair.high.receive(0, direction="forward", microbatch=0)
    pair.low.abort("stage 0, microbatch 0: ValueError: boom")
    with pytest.raises(StageFailedError, match="boom"):
        waiting.wait()
    pair.begin_step(2)
    (got,) = pair.forward([torch.ones(4)])
    assert torch.equal(got, torch.ones(4))


def test_begin_step_raises_when_a_peer_has_given_it_up_already(pair: Pair) -> None:
    pair.low.begin_step(2)
    pair.low.abort("no data")
    with pytest.raises(StageFailedError, match="no data"):
        _begin_again_and_again(pair.high, 2)
    pair.begin_step(3)


def _begin_again_and_again(links: Links, step: int) -> None:
    deadline = time.monotonic() + patient(10)
    while time.monotonic() < deadline:
        links.begin_step(step)


def test_timeout_names_ranks_direction_microbatch_and_step() -> None:
    pair = Pair(timeout_s=0.2)
    with pytest.raises(LinkTimeoutError) as caught:
        pair.high.receive(0, direction="forward", microbatch=3).wait()
    text = str(caught.value)
    for part in ("rank 0", "rank 1", "forward", "microbatch 3", "section 1", "0.2"):
        assert part in text
    pair.close()


def test_close_ends_pending_transfers_at_the_peer_too(pair: Pair) -> None:
    waiting = pair.high.receive(0, direction="forward", microbatch=0)
    pair.low.close()
    pair.low.close()
    with pytest.raises(TransportError, match="rank 0 has left"):
        waiting.wait()
    with pytest.raises(TransportError, match="closed"):
        pair.low.send(1, [torch.ones(1)], direction="forward", microbatch=0, codec=RAW)


@pytest.mark.parametrize("peer", [0, 2, -1, -3])
def test_send_to_nobody_or_oneself_is_refused(pair: Pair, peer: int) -> None:
    with pytest.raises(ConfigError):
        pair.low.send(peer, [torch.ones(1)], direction="forward", microbatch=0, codec=RAW)


def test_tensor_of_another_device_is_refused(pair: Pair) -> None:
    with pytest.raises(NotBuiltError, match="meta"):
        pair.low.send(
            1, [torch.empty(2, device="meta")], direction="forward", microbatch=0, codec=RAW
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_device_that_is_not_there_is_refused(pair: Pair) -> None:
    with pytest.raises((NotBuiltError, CudaError), match=r"cuda:0|CUDA"):
        pair.high.receive(0, direction="forward", microbatch=0, device=torch.device("cuda", 0))
    (got,) = pair.forward([torch.ones(3)])
    assert torch.equal(got, torch.ones(3))


def test_counters_tell_payload_from_wire(pair: Pair) -> None:
    pair.forward([torch.randn(64, 128)], Codec("int4"))
    sent, received = pair.low.counters(), pair.high.counters()
    assert sent.messages_sent == received.messages_received == 1
    assert sent.payload_nbytes_sent == received.payload_nbytes_received == 64 * 128 * 4
    assert sent.wire_nbytes_sent == received.wire_nbytes_received
    assert sent.wire_nbytes_sent < sent.payload_nbytes_sent / 6
    assert sent.messages_received == 0


def test_counters_start_at_zero(pair: Pair) -> None:
    assert pair.low.counters() == LinkCounters()


def test_emulated_link_delays_by_bandwidth_and_latency() -> None:
    pair = Pair(LinkEmulation(mbps=80, latency_ms=20))
    pair.low.send(1, [torch.ones(100_000)], direction="forward", microbatch=0, codec=RAW)
    transfer = pair.high.receive(0, direction="forward", microbatch=0)
    transfer.wait()
    # 400 kB at 10 MB/s and 20 ms on top
    assert transfer.done_s - transfer.started_s > 0.059
    pair.close()


@pytest.mark.parametrize("blocked_in", ["receive", "send"])
def test_other_python_threads_run_while_one_waits(blocked_in: str) -> None:
    pair = Pair(timeout_s=1.0)
    count = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal count
        while not done.wait(0.01):
            count += 1

    thread = threading.Thread(target=tick)
    thread.start()
    with pytest.raises(LinkTimeoutError):
        _block(pair, blocked_in)
    done.set()
    thread.join()
    pair.close()
    assert count >= 30


def _block(pair: Pair, how: str) -> None:
    waits: dict[str, Callable[[], Any]] = {
        "receive": lambda: pair.low.receive(1, direction="backward", microbatch=0).wait(),
        "send": lambda: pair.low.send(
            1, [torch.ones(4_000_000)], direction="forward", microbatch=0, codec=RAW
        ).wait(),
    }
    waits[how]()
