"""Reads what nvcc and ptxas make of the kernels: inexact instructions, resources by kernel.

`python -m tests.kernels.ptx` writes the golden table anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "resources.txt"
SOURCES = ("launch_encode", "launch_decode")
ARCHS = ("sm_80", "sm_90")
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s", re.MULTILINE)
_KERNEL = re.compile(
    r"(en|de)code_kernelI(f|NS_\d+[A-Z]\w+?E)NS_\d+(\w+?)Rule(?:ILi(\d+)EE)?ELi(\d+)ELi(\d+)ELb(\d)"
)
_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\n.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one thread (registers, bytes of stack and spills) or block (shared bytes) takes."""

    registers: int
    stack: int
    spills: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} {self.stack} {self.spills} {self.shared}"


Table = Mapping[str, Usage]


def find_compiler() -> tuple[str, str] | None:
    """nvcc and its ptxas, which the build would use too."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return None
    ptxas = shutil.which("ptxas", path=str(Path(nvcc).resolve().parent)) or shutil.which("ptxas")
    return None if ptxas is None else (nvcc, ptxas)


def nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def arithmetic_options() -> list[str]:
    """The build's options that decide how kernels calculate."""
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    (options,) = re.findall(r"COMPILE_LANGUAGE:CUDA>:(-[^>]*-Xptxas[^>]*)>", text)
    return [option for option in options.split() if not option.startswith("-X")]


def compile_to_ptx(nvcc: str, source: Path, output: Path, options: list[str]) -> str:
    command = [nvcc, "-std=c++20", "-arch=compute_80", "-ptx", f"-I{ROOT}/csrc", *options]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return output.read_text()


def assemble(ptxas: str, ptx: Path, arch: str) -> str:
    """What ptxas tells of its work."""
    command = [ptxas, "-v", f"-arch={arch}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def inexact(ptx: str) -> Iterator[str]:
    """Instructions that IEEE 754 does not decide alone, or that ptxas may still fuse."""
    for match in _INSTRUCTION.finditer(ptx):
        name, *modifiers = match[1].split(".")
        is_float = not _FLOATS.isdisjoint(modifiers)
        if name == "fma" or (name == "mad" and is_float):
            yield f"{match[1]}: a fused multiply-add"
        elif not {"ftz", "approx", "full"}.isdisjoint(modifiers):
            yield f"{match[1]}: flushes subnormals, or approximates"
        elif name in ("add", "sub", "mul") and is_float and "rn" not in modifiers:
            yield f"{match[1]}: without a rounding, so that ptxas may fuse it"


def kernel_name(symbol: str) -> str | None:
    """ "encode Bf16 Int4 32/64": dtype, rule, group size and unit size; "+" where it has spikes."""
    match = _KERNEL.search(symbol)
    if match is None:
        return None
    way, dtype, rule, bits, group, unit, has_spikes = match.groups()
    dtype = "Fp32" if dtype == "f" else re.sub(r"NS_\d+(\w+)E", r"\1", dtype)
    return f"{way}code {dtype} {rule}{bits or ''} {group}/{unit}{'+' * int(has_spikes)}"


def read_usage(text: str) -> dict[str, Usage]:
    """What `ptxas -v` told, by kernel."""
    table = {}
    for symbol, stack, stores, loads, registers, rest in _USAGE.findall(text):
        shared = re.search(r"(\d+) bytes smem", rest)
        spills = int(stores) + int(loads)
        usage = Usage(int(registers), int(stack), spills, int(shared[1]) if shared else 0)
        table[kernel_name(symbol) or symbol] = usage
    return table


def spilling(table: Table) -> list[str]:
    return [f"{name}: {usage}" for name, usage in table.items() if usage.stack or usage.spills]


def differences(table: Table, golden: Table) -> list[str]:
    names = sorted({*table, *golden})
    return [
        f"{name}: {golden.get(name, 'not there')} in the table, now {table.get(name, 'not there')}"
        for name in names
        if table.get(name) != golden.get(name)
    ]


def write_golden(version: str, tables: Mapping[str, Table]) -> str:
    lines = [f"nvcc {version}; kernel: registers, bytes of stack, spills and shared memory"]
    for arch, table in tables.items():
        lines += [arch, *(f"{name}: {usage}" for name, usage in sorted(table.items()))]
    return "\n".join(lines) + "\n"


def read_golden(text: str) -> tuple[str, dict[str, dict[str, Usage]]]:
    """The version of nvcc that it is for, and a table for each architecture."""
    first, *lines = text.splitlines()
    tables: dict[str, dict[str, Usage]] = {}
    table: dict[str, Usage] = {}
    for line in lines:
        name, _, numbers = line.partition(": ")
        if numbers:
            table[name] = Usage(*map(int, numbers.split()))
        else:
            table = tables[name] = {}
    return first.split(";")[0].removeprefix("nvcc "), tables


def examine(compiler: tuple[str, str], folder: Path) -> tuple[str, dict[str, dict[str, Usage]]]:
    """PTX of all kernels, and their resources for each architecture."""
    texts, tables = [], {arch: {} for arch in ARCHS}  # type: ignore[var-annotated]
    for name in SOURCES:
        ptx = folder / f"{name}.ptx"
        source = ROOT / "csrc" / "codec" / f"{name}.cu"
        texts.append(compile_to_ptx(compiler[0], source, ptx, arithmetic_options()))
        for arch in ARCHS:
            tables[arch].update(read_usage(assemble(compiler[1], ptx, arch)))
    return "\n".join(texts), tables


def main() -> None:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("expected nvcc and ptxas on PATH or in /usr/local/cuda/bin; got none")
    with tempfile.TemporaryDirectory() as folder:
        _, tables = examine(compiler, Path(folder))
    GOLDEN.write_text(write_golden(nvcc_version(compiler[0]), tables))


if __name__ == "__main__":
    main()
