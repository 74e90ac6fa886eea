"""Errors of pipecomm are what callers of torch, and of Python, expect to catch."""

from __future__ import annotations

import pytest

import pipecomm
from pipecomm import errors
from pipecomm._native import core

BUILTINS = {
    "ConfigError": ValueError,
    "CudaError": RuntimeError,
    "LinkTimeoutError": TimeoutError,
    "MessageMismatchError": RuntimeError,
    "NotBuiltError": NotImplementedError,
    "PeerLostError": ConnectionError,
    "PipecommError": RuntimeError,
    "PoolExhaustedError": MemoryError,
    "StageFailedError": RuntimeError,
    "TensorError": (ValueError, TypeError),
    "TransportError": ConnectionError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_error_is_public_and_a_builtin_one_too(name: str) -> None:
    error = getattr(errors, name)
    assert getattr(pipecomm, name) is error
    assert issubclass(error, errors.PipecommError)
    expected = BUILTINS[name]
    for builtin in expected if isinstance(expected, tuple) else (expected,):
        assert issubclass(error, builtin)


def test_lost_peer_is_an_error_of_the_transport() -> None:
    assert issubclass(errors.PeerLostError, errors.TransportError)


def test_core_raises_only_classes_that_exist() -> None:
    names = core.error_class_names()
    assert names
    assert {*names} <= {*errors.__all__}
