"""Arrays of other libraries through the codecs: NumPy as it is, others by what DLPack asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pipecomm.codecs.arrays import _to_tensor, decode_array, encode_array
from pipecomm.codecs.codec import Codec
from pipecomm.errors import ConfigError, TensorError
from tests.codecs.codec_reference import QUANTIZING, round_trip

NAMES = ("raw", *QUANTIZING)


def randn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def wire_of(name: str, x: np.ndarray) -> np.ndarray:
    return Codec(name).encode(torch.tensor(x)).numpy()


class Foreign:
    """An array of another library: immutable, no strides, known only by what DLPack asks."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = torch.from_dlpack(tensor)

    def __dlpack__(self, **options: Any) -> object:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __array_namespace__(self) -> ModuleType:
        module = ModuleType("foreign")
        module.from_dlpack = Foreign
        return module


# NumPy


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", NAMES)
def test_numpy_in_gives_numpy_out(name: str, dtype: type[np.floating[Any]]) -> None:
    for shape in ((), (0,), (1,), (2, 0), (3, 5, 71)):
        x = randn(*shape).astype(dtype) if shape else np.array(0.7, dtype)
        wire = encode_array(name, x)
        assert type(wire) is np.ndarray
        assert wire.dtype == np.uint8
        assert np.array_equal(wire, wire_of(name, x))
        back = decode_array(name, wire, x.shape, x.dtype)
        assert (type(back), back.shape, back.dtype) == (np.ndarray, x.shape, x.dtype)
        assert back.flags.writeable
        assert np.array_equal(back, round_trip(name, torch.tensor(x)).numpy())


LAYOUTS: dict[str, Callable[[], np.ndarray]] = {
    "transposed": lambda: randn(70, 6).T,
    "every second": lambda: randn(12, 140)[::2, ::2],
    "backwards": lambda: randn(6, 70)[::-1, ::-1],
    "broadcast": lambda: np.broadcast_to(randn(70), (6, 70)),
    "column-major": lambda: np.asfortranarray(randn(6, 70)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_layout_of_the_array_does_not_matter(name: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    assert np.array_equal(encode_array(name, x), wire_of(name, np.ascontiguousarray(x)))


def test_read_only_arrays_are_encoded_and_decoded() -> None:
    x = randn(4, 70)
    wire = encode_array("int4", x)
    for array in (x, wire):
        array.flags.writeable = False
    assert np.array_equal(encode_array("int4", x), wire)
    back = decode_array("int4", wire, x.shape, "float32")
    assert np.array_equal(back, round_trip("int4", torch.tensor(x)).numpy())


def test_arrays_are_read_where_they_lie() -> None:
    x = randn(4, 70)
    assert _to_tensor(x, "x").data_ptr() == x.ctypes.data
    assert _to_tensor(x.T, "x").data_ptr() == x.ctypes.data


def test_results_own_their_memory() -> None:
    x = randn(4, 70)
    wire = encode_array("raw", x)
    back = decode_array("raw", wire, x.shape, x.dtype)
    wire[:] = 0
    assert np.array_equal(back, x)
    back[:] = 1
    assert not wire.any()
    assert not np.array_equal(back, x)


@pytest.mark.parametrize("dtype", ["bool", "int16", "uint16", "int64", "float64", "complex64"])
def test_raw_carries_every_dtype_that_numpy_shares(dtype: str) -> None:
    x = (randn(3, 8) * 100).astype(dtype)
    wire = encode_array("raw", x)
    assert wire.tobytes() == x.tobytes()
    assert np.array_equal(decode_array("raw", wire, x.shape, x.dtype), x)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.dtype("float32"), "float32", "<f4", torch.float32], ids=repr
)
def test_dtypes_may_be_named_in_every_usual_way(dtype: object) -> None:
    x = randn(2, 64)
    assert decode_array("raw", encode_array("raw", x), (2, 64), dtype).dtype == np.float32


def test_pythons_float_is_numpys_not_torchs() -> None:
    x = randn(2, 64).astype(np.float64)
    assert np.array_equal(decode_array("raw", encode_array("raw", x), x.shape, float), x)


# Others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_array_with_dlpack_gives_one_of_its_own_library(dtype: torch.dtype) -> None:
    x = torch.tensor(randn(3, 70)).to(dtype)
    wire = encode_array("int8", Foreign(x))
    assert type(wire) is Foreign
    assert torch.equal(wire._tensor, Codec("int8").encode(x))
    back = decode_array("int8", wire, (3, 70), str(dtype).removeprefix("torch."))
    assert type(back) is Foreign
    assert torch.equal(back._tensor, round_trip("int8", x))


def test_a_library_without_a_namespace_method_is_found_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Older(Foreign):
        __module__ = "older.core"
        __array_namespace__ = property()  # type: ignore[assignment]

    library = ModuleType("older")
    library.from_dlpack = Older  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "older", library)
    wire = encode_array("int8", Older(torch.ones(2, 64)))
    assert type(wire) is Older


def test_torch_tensors_stay_torch_tensors() -> None:
    x = torch.tensor(randn(3, 70), requires_grad=True)
    wire = encode_array(Codec("int8"), x)
    assert torch.equal(wire, Codec("int8").encode(x))
    back = decode_array(Codec("int8"), wire, (3, 70), torch.float32)
    assert torch.equal(back, round_trip("int8", x.detach()))


# Wrong use


class Refusing:
    """Says that it lies on an OpenCL device, which torch has not."""

    dtype = "float32"

    def __dlpack__(self, **options: Any) -> object:
        raise BufferError("OpenCL memory stays here")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (4, 0)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (3, "__dlpack__; got int"),
        ([1.0, 2.0], "__dlpack__; got list"),
        (None, "__dlpack__; got NoneType"),
        (np.ones(3, ">f4"), "dtype >f4.*byte order"),
        (np.array([object()]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.zeros(4, [("a", "u1"), ("b", "<f4")])["b"], "stride"),
        (np.ones((2, 64)), "got torch.float64.*raw"),
        (np.ones((2, 64), np.int64), "got torch.int64.*raw"),
        (Refusing(), "got Refusing of dtype float32: OpenCL memory stays here"),
        (torch.ones(2, 64, device="meta"), "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_encoded_is_refused(x: object, text: str) -> None:
    with pytest.raises(TensorError, match=f"expected .*{text}"):
        encode_array("int8", x)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("bfloat16", "bfloat16 on cpu.*got ndarray"),
        (np.int64, "got torch.int64"),
        ("float3", "got 'float3'"),
        ("nn", "got 'nn'"),
        (object, "got <class 'object'>"),
        (None, "got None"),
    ],
    ids=str,
)
def test_what_cannot_be_decoded_to_is_refused(dtype: object, text: str) -> None:
    wire = encode_array("int8", randn(2, 64))
    with pytest.raises(TensorError, match=f"expected .*{text}"):
        decode_array("int8", wire, (2, 64), dtype)


def test_wire_of_another_size_or_kind_is_refused() -> None:
    wire = encode_array("int8", randn(2, 64))
    for bad in (wire[:-1], wire.view(np.int8), wire.reshape(2, -1), np.stack((wire, wire))[:, ::2]):
        with pytest.raises(TensorError, match="wire: expected"):
            decode_array("int8", bad, (2, 64), np.float32)
    for shape in ((2, -64), 128, (2.5, 64)):
        with pytest.raises(TensorError, match="expected a shape"):
            decode_array("int8", wire, shape, np.float32)


def test_an_unknown_codec_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="int2"):
        encode_array("int2", randn(2, 64))
