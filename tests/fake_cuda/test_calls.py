"""The stand-in driver has exactly the CUDA calls that the sources use."""

from __future__ import annotations

import re
from pathlib import Path

from tests import source_files as source

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "fake_cuda"
_CALL = re.compile(r"\b(cuda[A-Z]\w*)\s*\(|PC_DRIVER\(\s*(cu[A-Z]\w*)")
_RUNTIME = re.compile(
    r'^(?:extern "C" PC_API )?(?:cudaError_t|const char\*) (cuda[A-Z]\w*)\(', re.MULTILINE
)
_DRIVER = re.compile(r'\{"(cu[A-Z]\w*)", erased\(')
# What other code of a process does, and the tests do in its place.
OF_OTHERS = {
    "cudaEventDestroy",
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaThreadExchangeStreamCaptureMode",
}


def _without_texts(text: str) -> str:
    return re.sub(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*', "", text)


def calls_used(texts: list[str]) -> set[str]:
    found = (_CALL.findall(_without_texts(text)) for text in texts)
    return {runtime or driver for calls in found for runtime, driver in calls}


def calls_implemented(texts: list[str]) -> set[str]:
    names = {name for text in texts for name in (*_RUNTIME.findall(text), *_DRIVER.findall(text))}
    return {name.removesuffix("_v2") for name in names}


def test_stand_in_has_the_calls_that_the_sources_use_and_no_others() -> None:
    files = source.source_files(ROOT, ("csrc",), source.CPP_SUFFIXES)
    used = calls_used([path.read_text() for path in files])
    implemented = calls_implemented([p.read_text() for p in sorted(FAKE.iterdir()) if p.is_file()])
    assert len(used) > 30
    assert used == implemented - OF_OTHERS
    assert used.isdisjoint(OF_OTHERS)


def test_call_that_is_missing_on_either_side_is_seen() -> None:
    sources = [
        'check(cudaFree(data), "cudaMalloc()");  // cudaGetDevice()\nPC_DRIVER(cuMemMap, 0)(x);'
    ]
    assert calls_used(sources) == {"cudaFree", "cuMemMap"}
    fake = [
        "cudaError_t cudaFree(void* data) {\n  cudaMalloc(x);",
        '{"cuMemMap", erased(map_memory)},',
    ]
    assert calls_implemented(fake) == {"cudaFree", "cuMemMap"}
