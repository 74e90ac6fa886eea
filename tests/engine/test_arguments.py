"""What a Pipeline is given: what is refused, and the words that ranks compare."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipecomm.codecs.policy import CodecPolicy
from pipecomm.engine.arguments import check_arguments, chunks_of, policies_of, settings_text
from pipecomm.engine.updates import Updates
from pipecomm.errors import ConfigError
from pipecomm.schedule import build


def test_a_module_is_a_list_of_one() -> None:
    one, two = nn.Identity(), nn.Identity()
    assert chunks_of(one) == [one]
    assert chunks_of((one, two)) == [one, two]


@pytest.mark.parametrize("stage", [None, [], "stage", [nn.Identity(), 3]])
def test_what_is_no_module_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an nn\.Module as stage"):
        chunks_of(stage)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, "mean", 1.0), "expected a function as loss_fn; got 3"),
        ((None, "max", 1.0), 'loss_reduction "mean" or "sum"; got \'max\''),
        ((None, "sum", 0), "timeout_s of more than 0 s; got 0"),
        ((None, "sum", None), "timeout_s of more than 0 s; got None"),
    ],
)
def test_arguments_of_no_use_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_arguments(*arguments)
    check_arguments(print, "mean", 0.5)


def test_policies_are_checked_for_the_boundaries() -> None:
    assert {str(policy) for policy in policies_of("raw", "int8", 3).values()} == {
        str(CodecPolicy.parse(name)) for name in ("raw", "int8")
    }
    with pytest.raises(ConfigError, match="codec"):
        policies_of(["raw", "int8"], "raw", 3)


def test_settings_tell_apart_what_ranks_must_agree_on() -> None:
    schedule, policies = build("pipedream", 2, 4), policies_of("raw", "raw", 1)
    texts = {
        settings_text(schedule, policies, None),
        settings_text(build("1f1b", 2, 4), policies, None),
        settings_text(schedule, policies_of("int8", "raw", 1), None),
        settings_text(schedule, policies, Updates()),
        settings_text(schedule, policies, Updates("dc")),
    }
    assert len(texts) == 5
