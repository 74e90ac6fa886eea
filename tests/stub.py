"""What a stub and a module made with pybind11 say of themselves, in one form: names, signatures."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["differences", "of_module", "of_stub"]

# "Pool" -> "class", "Pool.trim" -> "(self), 0 optional", "Pool.limit_nbytes" -> "property, can be
# set".
Names = dict[str, str]


def of_stub(path: Path) -> Names:
    """Of a .pyi: aliases and TypedDicts, which exist for types alone, are left out."""
    found: Names = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _signature(node)
        elif isinstance(node, ast.ClassDef) and not node.bases:
            found[node.name] = "class"
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and _is_compared(member.name):
                    found[f"{node.name}.{member.name}"] = _member(member)
    return found


def of_module(module: ModuleType) -> Names:
    """Of a module of pybind11, whose docstrings begin with the signature."""
    found: Names = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        found[name] = "class" if isinstance(value, type) else _documented(value.__doc__)
        members = vars(value) if isinstance(value, type) else {}
        for member, held in members.items():
            if _is_compared(member) and (member != "__init__" or _has_signature(held)):
                found[f"{name}.{member}"] = (
                    _property(held.fset is not None)
                    if isinstance(held, property)
                    else _documented(held.__doc__)
                )
    return found


def differences(stub: Names, module: Names) -> list[str]:
    """A line for each name that only one has, or that the two describe differently."""
    pairs = {
        name: (stub.get(name, "missing"), module.get(name, "missing")) for name in stub | module
    }
    return [
        f"{name}: {ours} in the stub, {theirs} in the module"
        for name, (ours, theirs) in sorted(pairs.items())
        if ours != theirs
    ]


def _is_compared(member: str) -> bool:
    return member == "__init__" or not member.startswith("_")


def _property(can_be_set: bool) -> str:
    return "property, can be set" if can_be_set else "property"


def _member(node: ast.FunctionDef) -> str:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if decorators:
        # The setter comes last, and takes the place of the getter.
        return _property(decorators != ["property"])
    return _signature(node)


def _signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    names = [argument.arg for argument in arguments.args]
    if arguments.kwonlyargs:
        names += ["*", *(argument.arg for argument in arguments.kwonlyargs)]
    num_optional = len(arguments.defaults) + sum(one is not None for one in arguments.kw_defaults)
    return f"({', '.join(names)}), {num_optional} optional"


def _has_signature(function: Any) -> bool:
    return "->" in (function.__doc__ or "")


def _documented(doc: str | None) -> str:
    """`f(a: tuple[int, str], *, b: int = 0) -> None` and more is (a, *, b), 1 optional."""
    first = (doc or "").splitlines()[0]
    inside = first[first.index("(") + 1 : first.rindex(")", 0, first.rindex(" -> "))]
    while "[" in inside:  # types hold commas
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    parameters = [one.strip() for one in inside.split(",")] if inside else []
    names = [one.partition(":")[0].partition("=")[0].strip() for one in parameters]
    num_optional = sum("=" in one for one in parameters)
    return f"({', '.join(names)}), {num_optional} optional"
