"""The order of the tests: long modules first, so that no worker is left with one at the end.

How slow the machine is, measured before the first; and what modules of several rooms share.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import patience

# The longest first; the others follow by their names.
LONG = (
    "test_install",
    "test_benchmarks",
    "test_first_cause",
    "test_train",
    "test_hosts_faults",
    "test_kills",
    "test_transport_faults",
    "test_part",
    "test_docs",
    "test_bridge",
    "test_launcher",
    "test_backend_jobs",
)


def pytest_configure() -> None:
    patience.measure_once()
    # An example that takes long to make says something of the machine, not of the code.
    settings.register_profile("patient", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    """The folder of a torch that has a version and nothing else."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("__version__ = '9.8.7+test'\n")
    return folder
