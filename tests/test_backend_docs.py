"""docs/drop_in.md: every statement about a call names a test that exists and is run."""

from __future__ import annotations

import re
from pathlib import Path

from tests import (
    test_backend_groups,
    test_backend_life,
    test_backend_p2p,
    test_backend_waits,
)
from tests.backend_ranks import names

_DOCS = Path(__file__).parent.parent / "docs" / "drop_in.md"


def _named_tests() -> list[str]:
    rows = [line for line in _DOCS.read_text().splitlines() if line.startswith("| ")]
    return [re.findall(r"`(\w+)`", row.split("|")[2])[0] for row in rows[1:]]


def test_every_statement_has_a_test_of_its_own() -> None:
    named = _named_tests()
    assert len(named) > 20
    assert len(set(named)) == len(named)
    known = {
        *names(test_backend_p2p.CHECKS),
        *names(test_backend_waits.CHECKS),
        *names(test_backend_groups.CHECKS),
        *(check.__name__ for check in test_backend_life.CHECKS),
        *(name for name in vars(test_backend_life) if name.startswith("test_")),
    }
    assert set(named) <= known, set(named) - known
