"""The shape of the source: who may include or import whom, how long things are, how files open.

The tables are the rules (design, sections 2 and 3); the functions below them find what breaks
one, and are themselves tested on small trees that do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import source_files as source

ROOT = Path(__file__).resolve().parent.parent

# Folder of csrc/ -> folders it may include from, besides itself.
CPP_MAY_INCLUDE = {
    "base": set(),
    "device": {"base"},
    "codec": {"base"},
    "memory": {"base", "device"},
    "sockets": {"base", "memory"},
    "wire": {"base", "device", "memory", "codec"},
    "transport": {"base", "device", "memory", "codec", "sockets", "wire"},
    "python": {"base"},
    "bindings": {"base", "device", "memory", "codec", "wire", "transport", "python"},
    "torch": {"base", "device", "memory", "codec", "wire", "transport", "python"},
}
# Start of a foreign header's path -> the only folders that may include it.
FOREIGN_HEADERS = {
    "torch/": {"torch"},
    "ATen/": {"torch"},
    "c10/": {"torch"},
    "pybind11/": {"bindings", "python", "torch"},
    "Python.h": {"bindings", "python", "torch"},
    # They pull in headers of cusparse and friends that a build machine need not have.
    "ATen/cuda": set(),
}
# Part of the package -> all it may import, besides itself and the standard library.
PYTHON_MAY_IMPORT = {
    "pipecomm.errors": set(),
    "pipecomm.schedule": {"pipecomm.errors"},
    # The data of a schedule, which all functions over it stand on.
    "pipecomm.schedule.action": {"pipecomm.errors"},
    "pipecomm.schedule.placement": {"pipecomm.errors", "pipecomm.schedule.action"},
    "pipecomm.schedule.data": {
        "pipecomm.errors",
        "pipecomm.schedule.action",
        "pipecomm.schedule.placement",
    },
}
# Module -> modules it may not import itself.
PYTHON_MUST_NOT_IMPORT = {
    "pipecomm.pipeline": {"pipecomm._core", "pipecomm._native", "pipecomm.rendezvous"},
}
# Module -> modules it may not come to through others either.
PYTHON_MUST_NOT_REACH = {
    "pipecomm.pipeline": {"pipecomm.backend"},
    "pipecomm.backend": {"pipecomm.pipeline"},
    "pipecomm.schedule": {"torch", "pipecomm._core", "pipecomm._native"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = ("csrc", "pipecomm", "tests", "benchmarks")

Rule = Callable[[Path], Iterator[str]]


def cpp_files(root: Path) -> list[Path]:
    return source.source_files(root, ("csrc",), source.CPP_SUFFIXES)


def all_files(root: Path) -> list[Path]:
    return source.source_files(root, FOLDERS, {*source.CPP_SUFFIXES, ".py"})


def python_modules(root: Path) -> dict[str, Path]:
    files = source.source_files(root, ("pipecomm",), {".py"})
    return {source.module_name(root, path): path for path in files}


def python_edges(root: Path) -> dict[str, set[str]]:
    modules = python_modules(root)
    # The extension is a module too, though its file is not always there.
    known = {*modules, "pipecomm._core"}
    return {name: source.python_imports(root, path, known) for name, path in modules.items()}


def is_in(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def own_header(root: Path, path: Path, target: str) -> Path | None:
    csrc = root / "csrc"
    for candidate in (path.parent / target, csrc / target):
        if candidate.is_file() and candidate.resolve().is_relative_to(csrc.resolve()):
            return candidate.resolve()
    return None


def cpp_edges(root: Path) -> dict[str, set[str]]:
    """File -> own files it includes, as paths below csrc/."""
    csrc = (root / "csrc").resolve()
    return {
        str(path.resolve().relative_to(csrc)): {
            str(header.relative_to(csrc))
            for target in source.includes(path)
            if (header := own_header(root, path, target)) is not None
        }
        for path in cpp_files(root)
    }


def wrong_includes(root: Path) -> Iterator[str]:
    for path, headers in cpp_edges(root).items():
        folder = Path(path).parts[0]
        if folder not in CPP_MAY_INCLUDE:
            yield f"csrc/{path}: folder {folder} has no row in CPP_MAY_INCLUDE"
            continue
        for header in sorted(headers):
            if Path(header).parts[0] not in CPP_MAY_INCLUDE[folder] | {folder}:
                yield f"csrc/{path} may not include {header}"


def wrong_foreign_headers(root: Path) -> Iterator[str]:
    for path in cpp_files(root):
        folder = path.relative_to(root / "csrc").parts[0]
        for target in source.includes(path):
            if own_header(root, path, target) is not None:
                continue
            if any(target.startswith(p) and folder not in f for p, f in FOREIGN_HEADERS.items()):
                yield f"{path.relative_to(root)} may not include {target}"


def wrong_imports(root: Path) -> Iterator[str]:
    for module, imported in python_edges(root).items():
        for part, allowed in PYTHON_MAY_IMPORT.items():
            if is_in(module, part):
                for name in sorted(imported):
                    is_standard = name.partition(".")[0] in sys.stdlib_module_names
                    if not is_standard and not any(is_in(name, a) for a in {*allowed, part}):
                        yield f"{module} may not import {name}"
        for name in sorted(PYTHON_MUST_NOT_IMPORT.get(module, set()) & imported):
            yield f"{module} may not import {name}"


def wrong_reach(root: Path) -> Iterator[str]:
    edges = python_edges(root)
    for part, forbidden in PYTHON_MUST_NOT_REACH.items():
        reached = {module for module in edges if is_in(module, part)}
        todo = list(reached)
        while todo:
            new = edges.get(todo.pop(), set()) - reached
            reached |= new
            todo += new
        for name in sorted(reached):
            if any(is_in(name, other) for other in forbidden):
                yield f"{part} may not come to {name}, even through others"


def cycles(root: Path) -> Iterator[str]:
    for edges in (cpp_edges(root), python_edges(root)):
        cycle = source.find_cycle(edges)
        if cycle:
            yield "cycle: " + " -> ".join(cycle)


def missing_openings(root: Path) -> Iterator[str]:
    for path in all_files(root):
        text = path.read_text().lstrip()
        has_opening = (
            ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else text.startswith("//")
        )
        if text and not has_opening:
            yield f"{path.relative_to(root)}: expected its job in the first lines"


def long_files(root: Path) -> Iterator[str]:
    for path in all_files(root):
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{path.relative_to(root)}: {num_lines} lines, at most {MAX_FILE_LINES}"


def long_functions(root: Path) -> Iterator[str]:
    for path in all_files(root):
        functions = source.python_functions if path.suffix == ".py" else source.cpp_functions
        for line, num_lines in functions(path):
            if num_lines > MAX_FUNCTION_LINES:
                yield (
                    f"{path.relative_to(root)}:{line}: function of {num_lines} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )


def missing_exports(root: Path) -> Iterator[str]:
    for path in source.source_files(root, FOLDERS, {".py"}):
        for name in sorted(set(source.exported_names(path)) - source.bound_names(path)):
            yield f"{path.relative_to(root)}: __all__ has {name}, the module does not"


RULES: tuple[Rule, ...] = (
    wrong_includes,
    wrong_foreign_headers,
    wrong_imports,
    wrong_reach,
    cycles,
    missing_openings,
    long_files,
    long_functions,
    missing_exports,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(ROOT)) == []


def test_rules_see_the_source() -> None:
    assert len(cpp_edges(ROOT)) > 20
    assert any(header.startswith("base/") for edge in cpp_edges(ROOT).values() for header in edge)
    assert {*PYTHON_MAY_IMPORT, *PYTHON_MUST_NOT_IMPORT, *PYTHON_MUST_NOT_REACH} <= {
        *python_modules(ROOT)
    }
    assert {path.name for path in (ROOT / "csrc").iterdir()} == set(CPP_MAY_INCLUDE)


LONG_BODY = "  f();\n" * 60
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
    (wrong_includes, {"csrc/extra/a.h": "//"}, "folder extra has no row"),
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
        {"pipecomm/schedule/a.py": "from .. import codec", "pipecomm/codec.py": ""},
        "pipecomm.schedule.a may not import pipecomm.codec",
    ),
    (
        wrong_imports,
        {"pipecomm/pipeline.py": "from pipecomm import _core"},
        "pipecomm.pipeline may not import pipecomm._core",
    ),
    (
        wrong_imports,
        {"pipecomm/pipeline.py": "import importlib\nimportlib.import_module('pipecomm._native')"},
        "pipecomm.pipeline may not import pipecomm._native",
    ),
    (
        wrong_reach,
        {"pipecomm/pipeline.py": "from . import x", "pipecomm/x.py": "from .backend import y"},
        "pipecomm.pipeline may not come to pipecomm.backend",
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
    (missing_openings, {"csrc/base/a.h": "#pragma once\n// late"}, "csrc/base/a.h: expected"),
    (missing_openings, {"tests/a.py": "# no\nimport os"}, "tests/a.py: expected its job"),
    (long_files, {"benchmarks/a.py": "\n" * 401}, "benchmarks/a.py: 401 lines, at most 400"),
    (
        long_functions,
        {"csrc/base/a.cpp": f"namespace {{\nclass A {{\n int f() {{\n{LONG_BODY} }}\n}};\n}}"},
        "csrc/base/a.cpp:3: function of 62 lines",
    ),
    (
        long_functions,
        {"pipecomm/a.py": "class A:\n    async def f(self):\n" + "        g()\n" * 60},
        "pipecomm/a.py:2: function of 61 lines",
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
        "pipecomm/_src/csrc/a.h": "no job",
    }
    write_tree(tmp_path, files)
    assert [text for rule in RULES for text in rule(tmp_path)] == []
