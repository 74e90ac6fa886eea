"""Without a GPU, or a build with the CUDA kernels, these tests fail and say what is missing."""

from __future__ import annotations

import os

import pytest
import torch

from pipecomm._native import core


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if os.environ.get("PIPECOMM_CHECK_DEVICE") == "cpu":
        return  # a rehearsal, in which the host stands in
    if not torch.cuda.is_available():
        pytest.fail("torch finds no GPU here: tests/device is for machines that have one")
    if not core.build_info()["cuda"]:
        pytest.fail("pipecomm was built without CUDA: build with PIPECOMM_CUDA=on")
