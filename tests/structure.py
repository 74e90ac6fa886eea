"""The shape of the source: who may include or import whom, how long things are, how files open.

The tables are the rules (design, sections 2 and 3); the functions below them find what breaks one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import source_files as source

# Folder of csrc/ -> folders it may include from, besides itself. Who uses the transport knows its
# interface alone.
_BELOW_TRANSPORT = {"base", "device", "memory", "codec", "sockets", "wire", "ways"}
CPP_MAY_INCLUDE = {
    "base": set(),
    "device": {"base"},
    "codec": {"base"},
    "memory": {"base", "device"},
    "replay": {"base", "memory"},
    "sockets": {"base", "memory"},
    "wire": {"base", "memory", "codec"},
    "ways": {"base", "device", "memory", "codec"},
    "transport/api": {"base", "device", "memory", "sockets", "wire"},
    "transport/progress": {"base", "device", "sockets", "transport/api"},
    "transport/matching": {"base", "wire", "transport/api", "transport/progress"},
    "transport/moving": {
        *_BELOW_TRANSPORT,
        *("transport/api", "transport/progress", "transport/matching"),
    },
    "transport/remote": {"base", "sockets", "ways", "transport/api", "transport/progress"},
    "transport/group": {
        *_BELOW_TRANSPORT,
        *("transport/api", "transport/progress", "transport/matching"),
        *("transport/moving", "transport/remote"),
    },
    "transport/meeting": {
        *("base", "sockets", "wire"),
        *("transport/api", "transport/progress", "transport/remote", "transport/group"),
    },
    "schedule": {"base"},
    "python": {"base"},
    "bindings": {
        *("base", "device", "memory", "codec", "wire", "schedule", "replay", "python"),
        "transport/api",
    },
    "torch": {"base", "device", "memory", "codec", "wire", "python", "transport/api"},
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
# Room of the package, or module outside of any -> those it may import from, besides itself.
PYTHON_ROOMS = {
    "errors": set(),
    "_version": set(),
    "_native": {"errors", "_version", "_core"},
    "addressable": set(),
    "device": {"errors"},
    "settings": {"errors"},
    "outcome": {"errors", "settings"},
    "direction": set(),
    "schedule": {"errors", "direction", "_native"},
    "codecs": {"errors", "_native", "settings", "addressable"},
    "torch_half": {"errors", "_native", "settings"},
    "memory": {"errors", "_native", "device", "torch_half"},
    "replay": {"errors", "_native", "memory", "schedule"},
    "links": {
        *("errors", "_native", "settings", "direction", "addressable", "outcome"),
        *("codecs", "memory"),
    },
    "engine": {
        *("errors", "direction", "addressable", "device"),
        *("schedule", "codecs", "memory", "links"),
    },
    "drop_in": {"errors", "_native", "settings", "codecs", "links", "torch_half"},
    "app": {
        *("errors", "_version", "_native", "settings", "direction", "outcome"),
        *("schedule", "codecs", "links", "engine", "drop_in", "replay", "torch_half"),
    },
}
# Public names of what is in the rooms; no room imports them.
PYTHON_DOORS = {
    *("__main__", "arrays", "codec_ops", "deepspeed_p2p", "megatron", "metrics", "timeline"),
}
# What tests/test_doors.py tests: there is nothing in them.
TESTED_BY_DOORS = {*PYTHON_DOORS, "_version"}
# Part of the package -> all it may import, besides itself and the standard library.
PYTHON_MAY_IMPORT = {
    "pipecomm.errors": set(),
    "pipecomm.direction": set(),
    # The core runs the lists; nothing of it knows tensors.
    "pipecomm.schedule": {
        *("pipecomm.errors", "pipecomm.direction", "pipecomm._native"),
        *("numpy", "matplotlib"),
    },
    # The data of a schedule, which all functions over it stand on.
    "pipecomm.schedule.action": {"pipecomm.errors", "pipecomm.direction"},
    "pipecomm.schedule.placement": {
        "pipecomm.errors",
        "pipecomm.direction",
        "pipecomm.schedule.action",
    },
    "pipecomm.schedule.ranks": {"pipecomm.errors", "pipecomm.schedule.action", "numpy"},
    "pipecomm.schedule.data": {
        "pipecomm.errors",
        "pipecomm.schedule.action",
        "pipecomm.schedule.placement",
        "pipecomm.schedule.ranks",
        "numpy",
    },
}
# Module -> modules it may not come to through others either.
PYTHON_MUST_NOT_REACH = {
    "pipecomm.engine": {"pipecomm.drop_in"},
    "pipecomm.drop_in": {"pipecomm.engine"},
    "pipecomm.schedule": {"torch"},
}
# The only module that looks at the environment.
READS_ENVIRONMENT = "pipecomm.settings"
MAX_FILE_LINES = 390
MAX_FUNCTION_LINES = 40
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


def folder_of(path: str) -> str:
    """transport/api/wait.h is in transport/api."""
    return Path(path).parent.as_posix()


def unit_edges(root: Path) -> dict[str, set[str]]:
    """Unit (a header and its source, together) -> the other units that it includes."""
    edges: dict[str, set[str]] = {}
    for path, headers in cpp_edges(root).items():
        unit = Path(path).with_suffix("").as_posix()
        units = {Path(header).with_suffix("").as_posix() for header in headers}
        edges.setdefault(unit, set()).update(units - {unit})
    return edges


def wrong_includes(root: Path) -> Iterator[str]:
    for path, headers in cpp_edges(root).items():
        folder = folder_of(path)
        if folder not in CPP_MAY_INCLUDE:
            yield f"csrc/{path}: folder {folder} has no row in CPP_MAY_INCLUDE"
            continue
        for header in sorted(headers):
            if folder_of(header) not in CPP_MAY_INCLUDE[folder] | {folder}:
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


def room_of(module: str) -> str:
    """pipecomm.links.link is in links, pipecomm.errors by itself; the package itself is ""."""
    return module.partition(".")[2].partition(".")[0]


def wrong_rooms(root: Path) -> Iterator[str]:
    for module, imported in python_edges(root).items():
        room = room_of(module)
        if room in {"", *PYTHON_DOORS}:
            continue
        if room not in PYTHON_ROOMS:
            yield f"{module}: {room} has no row in PYTHON_ROOMS"
            continue
        for name in sorted(imported):
            if is_in(name, "pipecomm") and room_of(name) not in PYTHON_ROOMS[room] | {room}:
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
    for edges in (unit_edges(root), python_edges(root)):
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
                where = f"{path.relative_to(root)}:{line}"
                yield f"{where}: function of {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def reads_of_environment(root: Path) -> Iterator[str]:
    for module, path in python_modules(root).items():
        if module != READS_ENVIRONMENT:
            for line in source.environment_reads(path):
                yield f"{path.relative_to(root)}:{line}: reads the environment itself"


def untested_modules(root: Path) -> Iterator[str]:
    """A module x/y.py is tested by tests/x/test_y.py, or by several called test_y_*.py there."""
    for module, path in python_modules(root).items():
        if path.name == "__init__.py" or room_of(module) in TESTED_BY_DOORS:
            continue
        folder = root / "tests" / path.relative_to(root / "pipecomm").parent
        name = f"test_{path.stem.lstrip('_')}"
        if not [*folder.glob(f"{name}.py"), *folder.glob(f"{name}_*.py")]:
            yield f"{path.relative_to(root)}: expected a test module {name}.py in {folder.name}"


def missing_exports(root: Path) -> Iterator[str]:
    for path in source.source_files(root, FOLDERS, {".py"}):
        for name in sorted(set(source.exported_names(path)) - source.bound_names(path)):
            yield f"{path.relative_to(root)}: __all__ has {name}, the module does not"


RULES: tuple[Rule, ...] = (
    wrong_includes,
    wrong_foreign_headers,
    wrong_imports,
    wrong_rooms,
    wrong_reach,
    cycles,
    missing_openings,
    long_files,
    long_functions,
    reads_of_environment,
    untested_modules,
    missing_exports,
)
