"""Random messages between ranks over torch.distributed: every byte is checked, memory is watched.

`python -m tests.soak` (`make soak`) runs 100,000 of them; tests/test_soak.py runs a few.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.drop_in.backend_ranks import init
from tests.ranks import spawn_ranks

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
MAX_NBYTES = 6 << 20
NOISE_NBYTES = 16 << 20
MESSAGES_PER_ROUND = 200
TAGS = 5
# Above all tags of messages whose receiver knows the sender; each round has one of its own.
ANY_TAG = 1000
QUARTERS = 4
MAX_GROWTH_KIB = 2048


@dataclass(frozen=True)
class Message:
    source: int
    target: int
    tag: int
    dtype: torch.dtype
    numel: int
    offset: int  # of its bytes in the noise

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    resident_kib: int
    mapped_kib: int  # memfds: rings, and the pool with what is parked there
    num_fds: int
    num_threads: int

    @property
    def private_kib(self) -> int:
        """Besides rings and pool, which grow until the most that was parked at a time fits."""
        return self.resident_kib - self.mapped_kib


@dataclass
class Report:
    """What one rank did."""

    sent: int = 0
    received: int = 0
    received_nbytes: int = 0
    from_anybody: int = 0
    wrong: list[str] = field(default_factory=list)  # what should have arrived
    memory: list[Memory] = field(default_factory=list)


def plan_round(seed: int, index: int, size: int) -> list[Message]:
    """The messages of a round, the same on all ranks."""
    rng = random.Random(f"{seed}/{index}")
    messages = []
    for _ in range(MESSAGES_PER_ROUND):
        source, target = rng.sample(range(size), 2)
        messages.append(_message(rng, source, target, rng.randrange(TAGS), _random_nbytes(rng)))
    # Which of several senders answers a receive from anybody is open: their messages are alike.
    target, nbytes, dtype = rng.randrange(size), _random_nbytes(rng), rng.choice(DTYPES)
    for place in range(rng.randrange(6)):
        source = rng.choice([rank for rank in range(size) if rank != target])
        messages[place] = _message(rng, source, target, ANY_TAG + index, nbytes, dtype)
    return messages


def _random_nbytes(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.03:
        return 0
    limit = 4 << 10 if kind < 0.8 else 64 << 10 if kind < 0.95 else MAX_NBYTES
    return int(limit ** rng.random())


def _message(
    rng: random.Random,
    source: int,
    target: int,
    tag: int,
    nbytes: int,
    dtype: torch.dtype | None = None,
) -> Message:
    dtype = dtype or rng.choice(DTYPES)
    offset = rng.randrange((NOISE_NBYTES - nbytes) // 16) * 16
    return Message(source, target, tag, dtype, nbytes // dtype.itemsize, offset)


class Rank:
    """Sends and receives this rank's part of the rounds, in an order of its own."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.rng = random.Random(f"{seed} {rank}")
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randint(0, 256, (NOISE_NBYTES,), dtype=torch.uint8, generator=generator)
        self.report = Report()

    def run_round(self, messages: list[Message], *, blocking: bool) -> None:
        """With `blocking`, some sends block: all receives but the last are then posted before."""
        last = {message.target: message for message in messages if message.tag < ANY_TAG}
        sends = [message for message in messages if message.source == self.rank]
        receives = [message for message in messages if message.target == self.rank]
        posted = list(
            self._mix([message for message in receives if message is not last[self.rank]])
        )
        posted += self._mix(sends)
        if not blocking:
            posted = list(self._mix(posted))
        waits: list[tuple[dist.Work, Message, Tensor]] = []
        for batch in self._batches(posted):
            may_block = blocking and len(batch) == 1 and batch[0] is not last[batch[0].target]
            waits += self._post(batch, may_block)
        self._receive_blocking(last[self.rank])
        arrived = self._wait(waits)
        self._check_from_anybody(messages, arrived)
        self.report.sent += len(sends)
        self.report.received += len(receives)
        self.report.received_nbytes += sum(message.nbytes for message in receives)

    def _is_from_anybody(self, message: Message) -> bool:
        return message.tag >= ANY_TAG and message.target == self.rank

    def _mix(self, messages: list[Message]) -> Iterator[Message]:
        """In random order, but first in first out between two ranks within a tag."""
        queues: dict[Any, deque[Message]] = defaultdict(deque)
        for message in messages:
            source = None if self._is_from_anybody(message) else message.source
            queues[source, message.target, message.tag].append(message)
        while queues:
            key = self.rng.choice(list(queues))
            yield queues[key].popleft()
            if not queues[key]:
                del queues[key]

    def _batches(self, messages: list[Message]) -> Iterator[list[Message]]:
        """Mostly one message, sometimes some that are posted together; those have known sources."""
        for is_from_anybody, run in itertools.groupby(messages, self._is_from_anybody):
            left = list(run)
            while left:
                most = 1 if is_from_anybody or self.rng.random() < 0.8 else 8
                yield left[:most]
                left = left[most:]

    def _post(
        self, batch: list[Message], may_block: bool
    ) -> list[tuple[dist.Work, Message, Tensor]]:
        tensors = [self._tensor_for(message) for message in batch]
        if len(batch) > 1:
            calls = [
                dist.P2POp(dist.isend, tensor, message.target, tag=message.tag)
                if message.source == self.rank
                else dist.P2POp(dist.irecv, tensor, message.source, tag=message.tag)
                for message, tensor in zip(batch, tensors, strict=True)
            ]
            return list(zip(dist.batch_isend_irecv(calls), batch, tensors, strict=True))
        message, tensor = batch[0], tensors[0]
        if message.target == self.rank:
            source = None if self._is_from_anybody(message) else message.source
            return [(dist.irecv(tensor, source, tag=message.tag), message, tensor)]
        if may_block and self.rng.random() < 0.3:
            dist.send(tensor, message.target, tag=message.tag)
            self._overwrite(tensor)
            return []
        work = dist.isend(tensor, message.target, tag=message.tag)
        is_dropped = self.rng.random() < 0.1
        return [] if is_dropped else [(work, message, tensor)]

    def _tensor_for(self, message: Message) -> Tensor:
        if message.target == self.rank:
            return torch.empty(message.numel, dtype=message.dtype)
        tensor = self._contents(message)
        kind = self.rng.random()
        if kind < 0.5:
            return tensor
        return tensor.clone() if kind < 0.9 else torch.stack([tensor, tensor], 1)[:, 0]

    def _contents(self, message: Message) -> Tensor:
        contents = self.noise[message.offset : message.offset + message.nbytes]
        # torch makes 0 and 1 of other bytes where it copies booleans.
        is_bool = message.dtype == torch.bool
        return (contents & 1 if is_bool else contents).view(message.dtype)

    def _overwrite(self, sent: Tensor) -> None:
        if sent.untyped_storage().data_ptr() != self.noise.untyped_storage().data_ptr():
            sent.untyped_storage().fill_(0)

    def _receive_blocking(self, message: Message) -> None:
        tensor = torch.empty(message.numel, dtype=message.dtype)
        dist.recv(tensor, message.source, tag=message.tag)
        self._check(tensor, message)

    def _wait(
        self, waits: list[tuple[dist.Work, Message, Tensor]]
    ) -> dict[int, tuple[int, Tensor]]:
        """Wait in random order; give source and tensor of what came from anybody, by place."""
        arrived: dict[int, tuple[int, Tensor]] = {}
        numbered = list(enumerate(waits))
        self.rng.shuffle(numbered)
        for place, (work, message, tensor) in numbered:
            work.wait()
            if message.source == self.rank:
                self._overwrite(tensor)
            elif self._is_from_anybody(message):
                arrived[place] = (work._source_rank(), tensor)
            else:
                self._check(tensor, message)
        return arrived

    def _check_from_anybody(
        self, messages: list[Message], arrived: dict[int, tuple[int, Tensor]]
    ) -> None:
        """Those of one source answer the receives in order."""
        expected: dict[int, deque[Message]] = defaultdict(deque)
        for message in messages:
            if self._is_from_anybody(message):
                expected[message.source].append(message)
        for _, (source, tensor) in sorted(arrived.items()):
            self._check(tensor, expected[source].popleft())
            self.report.from_anybody += 1

    def _check(self, tensor: Tensor, message: Message) -> None:
        if not torch.equal(tensor.view(torch.uint8), self._contents(message).view(torch.uint8)):
            self.report.wrong.append(str(message))


def memory_now() -> Memory:
    """Without what malloc keeps for later: that depends on the sizes that came last."""
    ctypes.CDLL(None).malloc_trim(0)
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:pipecomm" in line:
            begin, _, end = line.split()[0].partition("-")
            mapped += int(end, 16) - int(begin, 16)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Memory(
        resident_kib=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        mapped_kib=mapped // 1024,
        num_fds=len(os.listdir("/proc/self/fd")),
        num_threads=len(os.listdir("/proc/self/task")),
    )


def run_rank(rank: int, size: int, store_path: str, num_rounds: int, seed: int) -> Report:
    init(rank, size, store_path, timeout=timedelta(seconds=60))
    worker = Rank(rank, seed)
    for index in range(num_rounds):
        worker.run_round(plan_round(seed, index, size), blocking=index % 2 == 1)
        if (index + 1) * QUARTERS // num_rounds > index * QUARTERS // num_rounds:
            dist.barrier()
            worker.report.memory.append(memory_now())
    dist.destroy_process_group()
    return worker.report


def soak(num_messages: int, *, size: int = 4, seed: int = 0, timeout_s: float) -> list[Report]:
    """Run whole rounds of at least `num_messages` in all; give each rank's report."""
    num_rounds = -(-num_messages // MESSAGES_PER_ROUND)
    reports: list[Report] = spawn_ranks(size, run_rank, num_rounds, seed, timeout_s=timeout_s)
    return reports


def problems(reports: list[Report]) -> list[str]:
    """What did not arrive as it was sent, and what grew from the first quarter to the last."""
    found = [f"expected {text}" for report in reports for text in report.wrong]
    if sum(report.sent for report in reports) != sum(report.received for report in reports):
        found.append("not as many messages were received as sent")
    for rank, report in enumerate(reports):
        first, last = report.memory[0], report.memory[-1]
        # The inner gloo opens and closes a socket now and then.
        for name, most in (("private_kib", MAX_GROWTH_KIB), ("num_fds", 3), ("num_threads", 0)):
            before, after = getattr(first, name), getattr(last, name)
            if after > before + most:
                found.append(f"rank {rank}: {name} grew from {before} to {after}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    reports = soak(options.messages, size=options.ranks, seed=options.seed, timeout_s=3600)
    print(
        f"{sum(report.received for report in reports)} messages, "
        f"{sum(report.received_nbytes for report in reports) / 1e9:.2f} GB, "
        f"{sum(report.from_anybody for report in reports)} received from anybody, "
        f"{time.monotonic() - started:.0f} s"
    )
    for rank, report in enumerate(reports):
        print(f"rank {rank} by quarter:", *report.memory, sep="\n  ")
    found = problems(reports)
    print(*found, f"{len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
