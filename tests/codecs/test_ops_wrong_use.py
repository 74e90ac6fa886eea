"""Operators refuse what the codec refuses, also in a graph; importing pipecomm makes them known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecomm.codecs import ops as codec_ops
from pipecomm.errors import ConfigError, TensorError
from tests.patience import patient


def decode(wire: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return codec_ops.decode(wire, [4], dtype, "int8")


def backward_of(grad_codec: str) -> None:
    codec_ops.through(torch.ones(4, requires_grad=True), "int8", grad_codec).sum().backward()


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "codec": (lambda: codec_ops.encode(torch.ones(4), "int2"), ConfigError, "int2"),
    "gradient's codec": (lambda: backward_of("int2"), ConfigError, "int2"),
    "seed": (lambda: codec_ops.encode(torch.ones(4), "int8", -1), ConfigError, "got -1"),
    "integers": (lambda: codec_ops.encode(torch.arange(4), "int8"), TensorError, "int64"),
    "target": (lambda: decode(torch.zeros(20).byte(), torch.int8), TensorError, "got torch.int8"),
    "size": (lambda: decode(torch.zeros(19).byte()), TensorError, "20 bytes.*19"),
    "dtype of the wire": (lambda: decode(torch.zeros(20)), TensorError, "uint8"),
    "layout": (lambda: codec_ops.encode(torch.eye(4).to_sparse(), "int8"), TensorError, "sparse"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_raises_what_the_codec_raises(case: str) -> None:
    call, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        call()


def test_wrong_dtype_is_found_when_a_graph_is_made() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(4, dtype=torch.float64))
        for call in (
            lambda: torch.ops.pipecomm.encode(x, "int8"),
            lambda: torch.ops.pipecomm.through(x, "int8", "raw"),
            lambda: torch.ops.pipecomm.decode(x, [4], torch.float64, "int8"),
        ):
            with pytest.raises(TensorError, match=r"got torch\.float64"):
                call()


def test_importing_pipecomm_registers_the_operators() -> None:
    code = "import torch, pipecomm; print(torch.ops.pipecomm.encode(torch.ones(4), 'int8').numel())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=patient(120)
    )
    assert result.stdout.strip() == "20", result.stderr
