"""The CUDA codecs give the host codecs' bytes and values, on any stream, at any size."""

from __future__ import annotations

import pytest
import torch

from pipecomm import Codec

CODECS = [
    "int8:group=32",
    "int8",
    "int8:group=128",
    "int8:hadamard=64",
    "int8:rounding=stochastic",
    "int4",
    "int4:hadamard=64",
    "int4:hadamard=64,rounding=stochastic",
    "int4-symmetric",
    "int4-symmetric:hadamard=64",
    "fp8",
    "nf4",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (31,), (64,), (3, 771), (64, 4096), (7, 1, 129), (0, 5), (2, 0), (1000, 33)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal values with groups of zeros, equal values, tiny, huge and non-finite ones."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    if flat.numel() > 2000:
        flat[128:256] = 0
        flat[256:384] = 3.5
        flat[384:512] *= 1e-30
        flat[512:640] *= 6e4
        flat[700], flat[900], flat[1100] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.cpu().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_device_encodes_the_hosts_bytes(name: str, dtype: torch.dtype) -> None:
    codec = Codec(name)
    for shape in SHAPES:
        x = values(shape, dtype)
        assert torch.equal(codec.encode(x.cuda(), seed=3).cpu(), codec.encode(x, seed=3)), shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_device_decodes_the_hosts_values(name: str, dtype: torch.dtype) -> None:
    codec = Codec(name)
    for shape in SHAPES:
        wire = codec.encode(values(shape, dtype))
        on_host = codec.decode(wire, torch.empty(shape, dtype=dtype))
        on_device = codec.decode(wire.cuda(), torch.empty(shape, dtype=dtype, device="cuda"))
        assert same_bits(on_device, on_host), shape


@pytest.mark.parametrize("name", ["int8", "int4", "int4:hadamard=64"])
@pytest.mark.parametrize("offset", [1, 3])
def test_memory_that_is_not_aligned_gives_the_same_bytes(name: str, offset: int) -> None:
    codec = Codec(name)
    x = values((64 * 771 + offset,), torch.bfloat16)[offset:]
    on_device = values((64 * 771 + offset,), torch.bfloat16).cuda()[offset:]
    wire = codec.encode(on_device)
    assert torch.equal(wire.cpu(), codec.encode(x))
    moved = torch.empty(wire.numel() + offset, dtype=torch.uint8, device="cuda")[offset:]
    moved.copy_(wire)
    out = torch.empty_like(on_device)
    assert same_bits(codec.decode(moved, out), codec.decode(wire.cpu(), torch.empty_like(x)))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_work_goes_to_the_current_stream_in_order(name: str) -> None:
    """What is encoded is what the stream had written before, although the host is far ahead."""
    codec = Codec(name)
    stream = torch.cuda.Stream()
    expected = codec.encode(torch.full((1 << 20,), 2.0))
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        wire = codec.encode(x)
        x.fill_(-1.0)
        out = codec.decode(wire, torch.empty_like(x))
    stream.synchronize()
    assert torch.equal(wire.cpu(), expected)
    assert torch.equal(out.cpu(), torch.full((1 << 20,), 2.0))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """The ends of the tensor are coded as they are alone."""
    codec = Codec(name)
    rows, cols = (1 << 31) // 4096 + 1, 4096
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    ends = values((2, cols), torch.bfloat16).nan_to_num(0, 0, 0)
    x[0], x[-1] = ends[0].cuda(), ends[1].cuda()
    out = codec.decode(codec.encode(x), torch.empty_like(x))
    alone = codec.decode(codec.encode(ends), torch.empty_like(ends))
    assert same_bits(out[0], alone[0])
    assert same_bits(out[-1], alone[1])
    assert out[1:-1].count_nonzero() == 0


def test_captured_in_a_graph_it_gives_the_same_bytes() -> None:
    codec = Codec("int4:hadamard=64")
    x, wire = torch.zeros(256, 4096, device="cuda"), None
    out = torch.empty(codec.wire_nbytes(x.shape, x.dtype), dtype=torch.uint8, device="cuda")
    codec.encode(x, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wire = codec.encode(x, out)
    given = values((256, 4096), torch.float32)
    x.copy_(given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(wire.cpu(), codec.encode(given))
