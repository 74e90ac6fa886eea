"""docs/drop_in.md: every statement about a call names a test that exists and is run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.drop_in import (
    test_backend_groups,
    test_backend_jobs,
    test_backend_life,
    test_backend_p2p,
    test_backend_tensors,
    test_backend_waits,
    test_env,
)
from tests.drop_in.backend_ranks import names
from tests.links import (
    test_generation,
    test_losses,
    test_parking,
    test_refusals,
    test_rendezvous,
)

_MODULES = (
    test_backend_groups,
    test_backend_jobs,
    test_backend_life,
    test_env,
    test_generation,
    test_losses,
    test_parking,
    test_refusals,
    test_rendezvous,
)
_TESTS = Path(__file__).parent.parent
_DOCS = _TESTS.parent / "docs" / "drop_in.md"


def _named_tests() -> list[str]:
    rows = [line for line in _DOCS.read_text().splitlines() if line.startswith("| ")]
    return [re.findall(r"`(\w+)`", row.split("|")[2])[0] for row in rows[1:]]


def test_every_statement_has_a_test_of_its_own() -> None:
    named = _named_tests()
    assert len(named) > 20
    assert len(set(named)) == len(named)
    known = {
        *names(test_backend_p2p.CHECKS),
        *names(test_backend_tensors.CHECKS),
        *names(test_backend_waits.CHECKS),
        *names(test_backend_groups.CHECKS),
        *(check.__name__ for check in test_backend_life.CHECKS),
        *(name for module in _MODULES for name in vars(module) if name.startswith("test_")),
    }
    assert set(named) <= known, set(named) - known


def test_every_recipe_names_a_test_that_exists() -> None:
    recipes = _DOCS.read_text().split("## Recipes")[1].split("\n## ")[0]
    modules = {path.name: path.read_text() for path in _TESTS.rglob("test_*.py")}
    sources = "\n".join(modules.values())
    for recipe in recipes.split("\n**")[1:]:
        named = re.findall(r"`(?:tests/(?:\w+/)?)?(test_\w+)(\.py)?`", recipe)
        assert named, recipe
        for name, suffix in named:
            assert f"{name}.py" in modules if suffix else f"def {name}(" in sources, name
