"""Limits of what is on its way: defaults, environment, numbers that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from pipecomm.errors import ConfigError
from pipecomm.links.limits import FlowLimits


def test_limits_default_to_a_ring_of_4_mib_and_eager_sends() -> None:
    assert FlowLimits() == FlowLimits(0, 4 << 20, False)


def test_limits_come_from_the_environment_where_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_MAX_INFLIGHT", "3")
    monkeypatch.setenv("PIPECOMM_MAX_INFLIGHT_NBYTES", str(1 << 20))
    monkeypatch.setenv("PIPECOMM_STRICT", "1")
    monkeypatch.setenv("PIPECOMM_MAX_PROCESS_INFLIGHT", "7")
    monkeypatch.setenv("PIPECOMM_MAX_PROCESS_INFLIGHT_NBYTES", "1000")
    assert FlowLimits() == FlowLimits(3, 1 << 20, True, 7, 1000)
    assert FlowLimits(strict=False) == FlowLimits(3, 1 << 20, False, 7, 1000)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MAX_INFLIGHT", "-1"), ("MAX_INFLIGHT_NBYTES", "4MiB"), ("STRICT", "yes")],
)
def test_variable_that_makes_no_sense_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PIPECOMM_{variable}", value)
    with pytest.raises(ConfigError, match=f"PIPECOMM_{variable}.*{value}"):
        FlowLimits()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_inflight": -1}, "max_inflight.*-1"),
        ({"max_process_inflight": -1}, "max_process_inflight.*-1"),
        ({"max_process_inflight_nbytes": 1.5}, "max_process_inflight_nbytes.*1.5"),
        ({"max_inflight": 1.5}, r"max_inflight.*1\.5"),
        ({"max_inflight": True}, "max_inflight.*True"),
        ({"max_inflight_nbytes": 0}, "multiple of 1048576.*0"),
        ({"max_inflight_nbytes": 1000}, "multiple of 1048576.*1000"),
        ({"max_inflight_nbytes": 1 << 60}, "max_inflight_nbytes"),
        ({"strict": 1}, "strict.*1"),
    ],
)
def test_limit_that_makes_no_sense_is_a_config_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FlowLimits(**arguments)


def test_settings_name_what_both_ends_must_agree_on() -> None:
    ours, theirs = FlowLimits(), FlowLimits(max_process_inflight=3, max_process_inflight_nbytes=7)
    assert ours.settings == theirs.settings
    assert FlowLimits(strict=True).settings == ours.settings.replace("False", "True")
    assert "max_inflight=5 " in FlowLimits(max_inflight=5).settings
