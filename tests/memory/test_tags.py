"""Memory counted by the tag it was allocated under."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from pipecomm.memory import MemoryPool, tag
from tests.patience import patient

MIB = 1 << 20


def test_memory_is_counted_by_the_tag_it_was_allocated_under() -> None:
    pool = MemoryPool()
    with tag("activations"):
        x = pool.empty((3000,), torch.uint8)
        with tag("scratch"):
            pool.empty((500,), torch.uint8)
        y = pool.empty((1000,), torch.uint8)
    pool.empty((7,), torch.uint8)
    stats = pool.tag_stats()
    assert stats["activations"].live_nbytes == 4000
    assert stats["activations"].num_allocations == 2
    assert stats["scratch"].live_nbytes == 0
    assert stats["scratch"].peak_live_nbytes == 500
    del x
    assert pool.tag_stats()["activations"].live_nbytes == 1000
    assert pool.tag_stats()["activations"].peak_live_nbytes == 4000
    pool.reset_peaks()
    assert pool.tag_stats()["activations"].peak_live_nbytes == 1000
    assert set(MemoryPool().tag_stats()) == set()
    del y


def fail_under_a_tag(pool: MemoryPool) -> None:
    with tag("main"):
        thread = threading.Thread(target=lambda: pool.empty((5,), torch.uint8))
        thread.start()
        thread.join()
        raise KeyError


def test_tag_is_of_its_thread_and_ends_with_an_error() -> None:
    pool = MemoryPool()
    with pytest.raises(KeyError):
        fail_under_a_tag(pool)
    pool.empty((5,), torch.uint8)
    assert "main" not in pool.tag_stats()


def test_more_tags_than_there_is_room_for_are_refused() -> None:
    program = textwrap.dedent("""
        from pipecomm.errors import ConfigError
        from pipecomm.memory import tag
        for i in range(255):
            with tag(str(i)):
                pass
        try:
            with tag("one more"):
                pass
        except ConfigError as error:
            print(error)
        with tag("7"):
            print("known")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60)
    )
    assert "expected at most 255 tags" in done.stdout
    assert done.stdout.endswith("known\n")
