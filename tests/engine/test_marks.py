"""Every action of a step has its name in a profile; where nobody looks, nothing happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pipecomm
from pipecomm.engine.marks import Marks

CPU = torch.device("cpu")


def names_in(seen: profile) -> list[str]:
    return [event.name for event in seen.events()]


def test_block_is_a_record_of_the_profiler() -> None:
    marks = Marks(CPU)
    with profile(activities=[ProfilerActivity.CPU]) as seen, marks.of("0F3"):
        torch.ones(1)
    assert "0F3" in names_in(seen)


def test_without_a_profiler_nothing_is_made() -> None:
    class NeverPrinted:
        def __str__(self) -> str:
            raise AssertionError("somebody looked")

    with Marks(CPU).of(NeverPrinted()):
        pass


def test_work_of_a_gpu_is_a_range_that_tools_from_outside_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []

    @contextmanager
    def open_range(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", open_range)
    with Marks(torch.device("cuda", 0)).of("1B0"):
        pass
    assert opened == ["1B0"]
    # emit_nvtx() makes a range of each record: a second one would nest in it.
    with profile(activities=[ProfilerActivity.CPU]), Marks(torch.device("cuda", 0)).of("1B0"):
        pass
    assert opened == ["1B0"]


def test_profile_of_a_step_shows_the_schedule() -> None:
    pipeline = pipecomm.Pipeline(
        nn.Linear(3, 3), schedule="gpipe", num_microbatches=2, loss_fn=nn.functional.mse_loss
    )
    with pipeline, profile(activities=[ProfilerActivity.CPU]) as seen:
        pipeline.train_step(torch.randn(4, 3), torch.randn(4, 3))
    own = [name for name in names_in(seen) if name in {"0F0", "0F1", "0B0", "0B1"}]
    assert own == ["0F0", "0F1", "0B0", "0B1"]
