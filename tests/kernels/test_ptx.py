"""The codec's kernels as compiled: exact arithmetic, no spills, resources as in resources.txt.

Each check is shown something that breaks its rule as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import ptx
from tests.kernels.ptx import Usage

COMPILER = ptx.find_compiler()
WHY = "nvcc and ptxas are not here: PTX, registers and spills of the kernels were NOT checked"
needs_nvcc = pytest.mark.skipif(COMPILER is None, reason=WHY)
# Templates of encode and decode: 5 rules, 3 dtypes, groups of 32 to 128, with transform or spikes.
NUM_KERNELS = 126
SYMBOL = (
    "_ZN8pipecomm13encode_kernelINS_4Bf16ENS_8Int4RuleELi32ELi64ELb1EEEvNS_9RunLayoutENS_11"
    "KernelNoiseEPKT_Ph"
)
TOLD = f"""ptxas info    : Compiling entry function '{SYMBOL}' for 'sm_90'
ptxas info    : Function properties for {SYMBOL}
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 548.730 ms
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_90'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("\tfma.rn.f32 \t%f1, %f2, %f3, %f4;", "fused"),
        ("\t@%p1 fma.rn.bf16x2 \t%r1, %r2, %r3, %r4;", "fused"),
        ("\tmad.rn.f32 \t%f1, %f2, %f3, %f4;", "fused"),
        ("\tmul.rn.ftz.f32 \t%f1, %f2, %f3;", "flushes"),
        ("\tex2.approx.f32 \t%f1, %f2;", "approximates"),
        ("\tdiv.full.f32 \t%f1, %f2, %f3;", "approximates"),
        ("\t@!%p2 mul.f32 \t%f1, %f2, %f3;", "may fuse"),
        ("\tadd.f64 \t%fd1, %fd2, %fd3;", "may fuse"),
    ],
)
def test_inexact_instruction_is_found(line: str, word: str) -> None:
    (found,) = ptx.inexact(f"{{\n\tmov.f32 \t%f1, %f2;\n{line}\n}}\n")
    assert word in found


def test_exact_instructions_are_not_found() -> None:
    exact = ("mul.rn.f32", "mad.lo.s32", "div.rn.f32", "add.s64", "max.f32", "cvt.rn.f32.s32")
    assert list(ptx.inexact("".join(f"\t{name} \t%r1, %r2;\n" for name in exact))) == []


def test_usage_is_read_by_kernel() -> None:
    table = ptx.read_usage(TOLD)
    assert table == {
        "encode Bf16 Int4 32/64+": Usage(64, 16, 12, 1024),
        "_Z5otherv": Usage(8, 0, 0, 0),
    }
    assert ptx.spilling(table) == ["encode Bf16 Int4 32/64+: 64 16 12 1024"]


def test_kernels_of_all_rules_are_named() -> None:
    name = "_ZN8pipecomm13decode_kernelI{}NS_{}ELi64ELi64ELb0EEEvNS_9RunLayoutEPKhPT_"
    names = [
        ("f", "13SymmetricRuleILi4EE"),
        ("NS_4Fp16E", "7Nf4Rule"),
        ("f", "13SymmetricRuleILi8EE"),
    ]
    assert [ptx.kernel_name(name.format(*words)) for words in names] == [
        "decode Fp32 Symmetric4 64/64",
        "decode Fp16 Nf4 64/64",
        "decode Fp32 Symmetric8 64/64",
    ]


def test_table_that_changed_is_told_by_kernel_with_both() -> None:
    golden = {"a": Usage(40, 0, 0, 0), "b": Usage(40, 0, 0, 0), "c": Usage(1, 0, 0, 0)}
    now = {"a": Usage(40, 0, 0, 0), "b": Usage(41, 0, 0, 0), "d": Usage(1, 0, 0, 0)}
    assert ptx.differences(now, golden) == [
        "b: 40 0 0 0 in the table, now 41 0 0 0",
        "c: 1 0 0 0 in the table, now not there",
        "d: not there in the table, now 1 0 0 0",
    ]
    assert ptx.differences(golden, golden) == []


def test_golden_table_is_of_every_kernel_and_has_no_spills() -> None:
    text = ptx.GOLDEN.read_text()
    version, tables = ptx.read_golden(text)
    assert ptx.write_golden(version, tables) == text
    assert {arch: len(table) for arch, table in tables.items()} == dict.fromkeys(
        ptx.ARCHS, NUM_KERNELS
    )
    assert [line for table in tables.values() for line in ptx.spilling(table)] == []
    assert not any(name.startswith("_Z") for table in tables.values() for name in table)


@pytest.mark.slow
@needs_nvcc
def test_kernels_are_exact_do_not_spill_and_take_what_the_table_says(tmp_path: Path) -> None:
    assert COMPILER is not None
    text, tables = ptx.examine(COMPILER, tmp_path)
    assert sorted(set(ptx.inexact(text))) == []
    assert [line for table in tables.values() for line in ptx.spilling(table)] == []
    assert {len(table) for table in tables.values()} == {NUM_KERNELS}
    golden_version, golden = ptx.read_golden(ptx.GOLDEN.read_text())
    version = ptx.nvcc_version(COMPILER[0])
    if version != golden_version:
        pytest.skip(f"resources.txt is of nvcc {golden_version}, this is {version}: NOT compared")
    changed = [line for arch in ptx.ARCHS for line in ptx.differences(tables[arch], golden[arch])]
    assert changed == [], "python -m tests.kernels.ptx writes the table anew"


@needs_nvcc
@pytest.mark.parametrize(
    ("options", "word"),
    [([], "fused"), (["--fmad=false", "-use_fast_math"], "approximates"), (["--fmad=false"], "")],
)
def test_kernel_that_fuses_or_approximates_is_caught_as_compiled(
    tmp_path: Path, options: list[str], word: str
) -> None:
    assert COMPILER is not None
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float* x) { x[0] = x[1] * x[2] + x[3] / x[4]; }\n")
    found = list(ptx.inexact(ptx.compile_to_ptx(COMPILER[0], source, tmp_path / "k.ptx", options)))
    assert any(word in line for line in found) if word else found == []


def test_build_forbids_fused_multiply_adds() -> None:
    assert "--fmad=false" in ptx.arithmetic_options()
