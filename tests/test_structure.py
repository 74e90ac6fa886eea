"""The source keeps the rules of its shape, and each rule finds what breaks it in a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import (
    CPP_MAY_INCLUDE,
    PYTHON_DOORS,
    PYTHON_MAY_IMPORT,
    PYTHON_MUST_NOT_REACH,
    PYTHON_ROOMS,
    RULES,
    Rule,
    cpp_edges,
    cycles,
    folder_of,
    long_files,
    long_functions,
    missing_exports,
    missing_openings,
    python_modules,
    reads_of_environment,
    room_of,
    untested_modules,
    wrong_foreign_headers,
    wrong_imports,
    wrong_includes,
    wrong_reach,
    wrong_rooms,
)

ROOT = Path(__file__).resolve().parent.parent


def rows_of(page: str, heading: str) -> dict[str, set[str]]:
    """First column -> the names in the last, of the table that begins with `heading`."""
    lines = page.split(f"| {heading}")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip(" `") for cell in line.strip("|").split(" |")] for line in lines]
    return {first: set(filter(None, last.split(", "))) for first, _, last in cells}


@pytest.mark.parametrize(
    ("heading", "table"),
    [("Folder of `csrc/`", CPP_MAY_INCLUDE), ("Room or module", PYTHON_ROOMS)],
    ids=["csrc", "pipecomm"],
)
def test_architecture_page_shows_the_same_table(heading: str, table: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert rows_of(page, heading) == {
        name: {one.removeprefix("transport/") for one in allowed} for name, allowed in table.items()
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(ROOT)) == []


def test_rules_see_the_source() -> None:
    assert len(cpp_edges(ROOT)) > 20
    assert any(header.startswith("base/") for edge in cpp_edges(ROOT).values() for header in edge)
    assert {*PYTHON_MAY_IMPORT, *PYTHON_MUST_NOT_REACH} <= {*python_modules(ROOT)}
    rooms = {room_of(module) for module in python_modules(ROOT)} - {""}
    assert rooms == {*PYTHON_ROOMS, *PYTHON_DOORS}
    assert {folder_of(path) for path in cpp_edges(ROOT)} == set(CPP_MAY_INCLUDE)


LONG_BODY = "  f();\n" * 60
LONG_CPP_BODY = "  f();\n" * 39
BREAKS: list[tuple[Rule, dict[str, str], str]] = [
    (
        wrong_includes,
        {"csrc/codec/a.h": '#include "memory/b.h"', "csrc/memory/b.h": "//"},
        "csrc/codec/a.h may not include memory/b.h",
    ),
    (
        wrong_includes,
        {"csrc/base/a.cpp": '#  include "../torch/b.h"', "csrc/torch/b.h": "//"},
        "csrc/base/a.cpp may not include torch/b.h",
    ),
    (
        wrong_includes,
        {
            "csrc/transport/api/a.h": '#include "transport/group/b.h"',
            "csrc/transport/group/b.h": "//",
        },
        "csrc/transport/api/a.h may not include transport/group/b.h",
    ),
    (
        wrong_includes,
        {"csrc/torch/a.h": '#include "transport/moving/b.h"', "csrc/transport/moving/b.h": "//"},
        "csrc/torch/a.h may not include transport/moving/b.h",
    ),
    (wrong_includes, {"csrc/extra/a.h": "//"}, "folder extra has no row"),
    (wrong_includes, {"csrc/transport/a.h": "//"}, "folder transport has no row"),
    (
        wrong_foreign_headers,
        {"csrc/transport/a.cpp": "#include <c10/util/Half.h>"},
        "csrc/transport/a.cpp may not include c10/util/Half.h",
    ),
    (
        wrong_foreign_headers,
        {"csrc/codec/a.cu": "#include <pybind11/pybind11.h>"},
        "csrc/codec/a.cu may not include pybind11/pybind11.h",
    ),
    (
        wrong_foreign_headers,
        {"csrc/torch/a.cpp": "#include <ATen/cuda/CUDAContext.h>"},
        "csrc/torch/a.cpp may not include ATen/cuda/CUDAContext.h",
    ),
    (
        wrong_imports,
        {"pipecomm/schedule/a.py": "def f():\n    import torch.nn"},
        "pipecomm.schedule.a may not import torch.nn",
    ),
    (
        wrong_imports,
        {"pipecomm/schedule/a.py": "from ..codecs import codec", "pipecomm/codecs/codec.py": ""},
        "pipecomm.schedule.a may not import pipecomm.codecs.codec",
    ),
    (
        wrong_rooms,
        {"pipecomm/engine/pipeline.py": "from pipecomm import _core"},
        "pipecomm.engine.pipeline may not import pipecomm._core",
    ),
    (
        wrong_rooms,
        {"pipecomm/engine/a.py": "import importlib\nimportlib.import_module('pipecomm._native')"},
        "pipecomm.engine.a may not import pipecomm._native",
    ),
    (
        wrong_rooms,
        {"pipecomm/links/a.py": "from ..app.b import c", "pipecomm/app/b.py": ""},
        "pipecomm.links.a may not import pipecomm.app.b",
    ),
    (wrong_rooms, {"pipecomm/cellar/a.py": ""}, "cellar has no row in PYTHON_ROOMS"),
    (
        wrong_rooms,
        {"pipecomm/app/a.py": "import pipecomm.megatron", "pipecomm/megatron.py": ""},
        "pipecomm.app.a may not import pipecomm.megatron",
    ),
    (
        wrong_reach,
        {
            "pipecomm/engine/__init__.py": "from ..links import x",
            "pipecomm/links/x.py": "from ..drop_in import y",
            "pipecomm/drop_in/y.py": "",
        },
        "pipecomm.engine may not come to pipecomm.drop_in",
    ),
    (
        wrong_reach,
        {
            "pipecomm/schedule/__init__.py": "from ..errors import E",
            "pipecomm/errors.py": "import torch",
        },
        "pipecomm.schedule may not come to torch",
    ),
    (cycles, {"pipecomm/a.py": "from . import b", "pipecomm/b.py": "import pipecomm.a"}, "cycle: "),
    (
        cycles,
        {"csrc/base/a.h": '#include "b.h"', "csrc/base/b.h": '#include "base/a.h"'},
        "cycle: ",
    ),
    (
        cycles,  # of units, not of files: each source includes the other's header
        {
            "csrc/base/a.h": "//",
            "csrc/base/a.cpp": '#include "base/a.h"\n#include "base/b.h"',
            "csrc/base/b.h": "//",
            "csrc/base/b.cpp": '#include "base/c.h"',
            "csrc/base/c.h": "//",
            "csrc/base/c.cpp": '#include "base/a.h"',
        },
        "cycle: ",
    ),
    (missing_openings, {"csrc/base/a.h": "#pragma once\n// late"}, "csrc/base/a.h: expected"),
    (missing_openings, {"tests/a.py": "# no\nimport os"}, "tests/a.py: expected its job"),
    (long_files, {"benchmarks/a.py": "\n" * 391}, "benchmarks/a.py: 391 lines, at most 390"),
    (long_files, {"tests/cpp/a.cpp": "\n" * 391}, "tests/cpp/a.cpp: 391 lines, at most 390"),
    (
        long_functions,
        {"csrc/base/a.cpp": f"namespace {{\nclass A {{\n int f() {{\n{LONG_CPP_BODY} }}\n}};\n}}"},
        "csrc/base/a.cpp:3: function of 41 lines, at most 40",
    ),
    (
        long_functions,
        {"pipecomm/a.py": "class A:\n    async def f(self):\n" + "        g()\n" * 40},
        "pipecomm/a.py:2: function of 41 lines",
    ),
    (
        reads_of_environment,
        {"pipecomm/a.py": "import os\nx = os.environ['Y']", "pipecomm/settings.py": "os.environ"},
        "pipecomm/a.py:2: reads the environment itself",
    ),
    (
        reads_of_environment,
        {"pipecomm/b/a.py": "def f():\n    from os import getenv as g"},
        "pipecomm/b/a.py:2: reads",
    ),
    (
        untested_modules,
        {
            "pipecomm/__init__.py": "",
            "pipecomm/a.py": "",
            "pipecomm/b/_c.py": "",
            "pipecomm/b/d.py": "",
            "pipecomm/megatron.py": "",
            "tests/test_a.py": "",
            "tests/b/test_c_more.py": "",
            "tests/test_d.py": "",
        },
        "pipecomm/b/d.py: expected a test module test_d.py in b",
    ),
    (
        missing_exports,
        {"pipecomm/a.py": "__all__ = ['x', 'y']\nif True:\n    x = 1\ndef f():\n    y = 1"},
        "pipecomm/a.py: __all__ has y, the module does not",
    ),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("rule", "files", "text"), BREAKS, ids=[f"{rule.__name__}-{text}" for rule, _, text in BREAKS]
)
def test_rule_finds_what_breaks_it(
    rule: Rule, files: dict[str, str], text: str, tmp_path: Path
) -> None:
    write_tree(tmp_path, files)
    found = list(rule(tmp_path))
    assert len(found) == 1
    assert text in found[0]


def test_rules_accept_a_tree_that_keeps_them(tmp_path: Path) -> None:
    table = "// Its job.\nint table[] = {\n" + " 1,\n" * 70 + "};\n"
    braces = "  g(\"{{{\", '{');  // {{{\n"
    files = {
        "csrc/base/a.h": "// Its job.\n#define X {\n",
        "csrc/base/table.cpp": table,
        "csrc/base/short.cpp": "// Its job.\n" + f"void f() {{\n{braces}}}\n" * 40,
        "csrc/torch/a.cpp": '// Its job.\n#include <torch/torch.h>\n#include "base/a.h"\n',
        "csrc/codec/a.cpp": '// Its job.\n// #include "memory/b.h"\n',
        "csrc/memory/b.h": "// Its job.\n",
        "pipecomm/__init__.py": "",
        "pipecomm/schedule/a.py": '"""Its job."""\nimport csv\nfrom .b import x\n__all__ = ["x"]',
        "pipecomm/schedule/b.py": '"""Its job."""\nfrom pipecomm.errors import E as x',
        "pipecomm/errors.py": '"""Its job."""\nclass E(Exception):\n    pass',
        "tests/test_errors.py": '"""Its job."""',
        "tests/schedule/test_a.py": '"""Its job."""',
        "tests/schedule/test_b_and_more.py": '"""Its job."""',
        "pipecomm/_src/csrc/a.h": "no job",
    }
    write_tree(tmp_path, files)
    assert [text for rule in RULES for text in rule(tmp_path)] == []
