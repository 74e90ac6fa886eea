"""Facts read from source files without running them: includes, imports, functions, names."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "CPP_SUFFIXES",
    "bound_names",
    "cpp_functions",
    "cpp_variables",
    "environment_reads",
    "exported_names",
    "find_cycle",
    "includes",
    "module_name",
    "python_functions",
    "python_imports",
    "source_files",
]

CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
# Made by a build.
_SKIPPED_FOLDERS = {"_src", "build", "out", "__pycache__"}

_NOT_CODE = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|//[^\n]*|/\*.*?\*/'
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
_GETENV = re.compile(r'getenv\(\s*"(\w+)"')
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_SCOPE = re.compile(
    r"(?:template\s*<.*>\s*)?(?:inline\s+)?(?:(?:namespace|class|struct|union|enum)\b|extern\s*$)",
    re.DOTALL,
)


def source_files(root: Path, folders: tuple[str, ...], suffixes: set[str]) -> list[Path]:
    """Every file with one of the suffixes below the folders of root, generated ones left out."""
    return sorted(
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes and not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )


def includes(path: Path) -> list[str]:
    """What a C++ file includes, as written."""
    return _INCLUDE.findall(_COMMENT.sub("", path.read_text()))


def cpp_functions(path: Path) -> Iterator[tuple[int, int]]:
    """First line and number of lines of each function body outside other functions."""
    text = _NOT_CODE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
    scopes: list[tuple[str, int]] = []
    head_start = 0
    for match in re.finditer(r"[{};]", text):
        at = match.start()
        if match[0] == "{":
            scopes.append((_kind(text[head_start:at].strip()), at))
        elif match[0] == "}" and scopes:
            kind, start = scopes.pop()
            if kind == "function" and all(outer == "scope" for outer, _ in scopes):
                yield text.count("\n", 0, start) + 1, text.count("\n", start, at) + 1
        head_start = at + 1


def _kind(head: str) -> str:
    if _SCOPE.match(head):
        return "scope"
    return "data" if head.endswith(("=", ",", "return")) else "function"


def module_name(root: Path, path: Path) -> str:
    """The dotted name: pipecomm/schedule/__init__.py is pipecomm.schedule."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_imports(root: Path, path: Path, modules: set[str]) -> set[str]:
    """Full names of all modules a file imports, anywhere in it; a package's module by its own."""
    package = module_name(root, path)
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= _imported_from(node, package, modules)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    return found


def _imported_from(node: ast.ImportFrom, package: str, modules: set[str]) -> set[str]:
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    names = {f"{base}.{alias.name}" for alias in node.names}
    own = names & modules
    return own if own == names else own | {base}


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def python_functions(path: Path) -> Iterator[tuple[int, int]]:
    """First line and number of lines of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def environment_reads(path: Path) -> Iterator[int]:
    """Lines that name the environment of the process, or a function that reads it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = {
            ast.Attribute: lambda n: [n.attr],
            ast.Name: lambda n: [n.id],
            ast.ImportFrom: lambda n: [alias.name for alias in n.names],
        }.get(type(node), lambda n: [])(node)
        if {*names} & _ENVIRONMENT:
            yield node.lineno


def cpp_variables(path: Path) -> set[str]:
    """The environment variables that a C++ file reads."""
    return {*_GETENV.findall(_COMMENT.sub("", path.read_text()))}


def exported_names(path: Path) -> list[str]:
    """The strings written in `__all__`; names it takes from another list are not included."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in _targets(node):
            elements = getattr(node.value, "elts", [])
            return [element.value for element in elements if isinstance(element, ast.Constant)]
    return []


def bound_names(path: Path) -> set[str]:
    """Every name a module's top level gives a meaning to."""
    names: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= _targets(node)
        else:
            todo += ast.iter_child_nodes(node)
    return names


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Some cycle in a graph, first node repeated at its end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []
