"""Hosts for the tests of this folder, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Hosts, why_impossible


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three of them, whose links are as fast as the machine."""
    if why := why_impossible():
        pytest.skip(why)
    with Hosts(3) as made:
        yield made
