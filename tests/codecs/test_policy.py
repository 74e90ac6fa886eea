"""Which codec a boundary uses: by place, by step, by the link's speed, and by its error."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from pipecomm.codecs.codec import Codec
from pipecomm.codecs.policy import BoundaryCodec, CodecPolicy, codec_for_speed, relative_error
from pipecomm.errors import ConfigError


def names_at(policy: CodecPolicy, num_boundaries: int) -> list[str]:
    policy.check(num_boundaries)
    return [policy.at(boundary, num_boundaries) for boundary in range(num_boundaries)]


def test_one_codec_is_for_all_boundaries() -> None:
    assert names_at(CodecPolicy.parse("int4"), 3) == ["int4"] * 3
    assert names_at(CodecPolicy.parse(Codec("int8")), 2) == ["int8"] * 2


def test_list_names_the_codec_of_each_boundary() -> None:
    assert names_at(CodecPolicy.parse(["int4", Codec("int8"), "raw"]), 3) == ["int4", "int8", "raw"]


def test_boundaries_not_named_stay_raw() -> None:
    assert names_at(CodecPolicy("int4", boundaries=range(2)), 4) == ["int4", "int4", "raw", "raw"]
    assert names_at(CodecPolicy("int4", boundaries={3}), 4) == ["raw", "raw", "raw", "int4"]
    assert names_at(CodecPolicy("int4", boundaries=()), 2) == ["raw", "raw"]


@pytest.mark.parametrize(("number", "expected"), [(1, "r"), (2, "rr"), (4, "rccr")])
def test_ends_may_stay_raw(number: int, expected: str) -> None:
    found = names_at(CodecPolicy("int8", keep_ends_raw=True), number)
    assert found == [{"r": "raw", "c": "int8"}[letter] for letter in expected]


def test_policy_is_its_own_parse() -> None:
    policy = CodecPolicy("int4", warmup_steps=5)
    assert CodecPolicy.parse(policy) is policy


def test_text_is_the_codecs_name_or_tells_every_setting_apart() -> None:
    assert str(CodecPolicy("int8:group=64")) == "int8"
    assert str(CodecPolicy(["int4", "raw"])) == "int4, raw"
    policies = [
        CodecPolicy("int4"),
        CodecPolicy("int8"),
        CodecPolicy("int4", boundaries=(0,)),
        CodecPolicy("int4", keep_ends_raw=True),
        CodecPolicy("int4", warmup_steps=1),
        CodecPolicy("int4", min_nbytes=1),
        CodecPolicy("int4", guard_every=1),
        CodecPolicy("int4", guard_limit=0.1),
    ]
    assert len({str(policy) for policy in policies}) == len(policies)


@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": "int3"},
        {"codec": ["int4", "int3"]},
        {"codec": 4},
        {"codec": [None]},
        {"boundaries": 3},
        {"boundaries": "01"},
        {"boundaries": [1, "0"]},
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"min_nbytes": -1},
        {"guard_every": "2"},
        {"guard_limit": 0},
        {"guard_limit": float("nan")},
    ],
)
def test_senseless_policy_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        CodecPolicy(**arguments)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (CodecPolicy(["int4"] * 3), "one for each of 2 boundaries; got 3"),
        (CodecPolicy([]), "one for each of 2 boundaries; got 0"),
        (CodecPolicy("int4", boundaries=(2,)), "from 0 to 1; got 2"),
        (CodecPolicy("int4", boundaries=(-1,)), "from 0 to 1; got -1"),
    ],
)
def test_policy_of_another_number_of_boundaries_is_refused(policy: CodecPolicy, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        policy.check(2)


@pytest.mark.parametrize(
    ("bytes_per_s", "codec"),
    [
        (float("inf"), "raw"),
        (10e9, "raw"),
        (2.03e9, "raw"),
        (1.6e9, "raw"),
        (1.25e9, "int8"),
        (12.5e6, "int8"),
        (0.0, "int8"),
    ],
)
def test_auto_takes_8_bits_where_a_codec_is_surely_faster_than_the_link(
    bytes_per_s: float, codec: str
) -> None:
    assert codec_for_speed(bytes_per_s) == Codec(codec)


def choices(policy: CodecPolicy, tensors: list[torch.Tensor], num_steps: int) -> list[str]:
    """The codec of microbatch 0 in each training step."""
    boundary = BoundaryCodec(policy, Codec("int4"), "stage 0, forward")
    found = []
    for _ in range(num_steps):
        boundary.begin_step()
        found.append(str(boundary.choose(0, tensors, trains=True)))
    return found


def smooth() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def test_first_training_steps_stay_raw() -> None:
    assert choices(CodecPolicy("int4", warmup_steps=2), [smooth()], 4) == ["raw"] * 2 + ["int4"] * 2


def test_evaluation_uses_what_the_next_training_step_will() -> None:
    boundary = BoundaryCodec(CodecPolicy("int4", warmup_steps=1), Codec("int4"), "here")
    before = str(boundary.choose(0, [smooth()], trains=False))
    boundary.begin_step()
    training = str(boundary.choose(0, [smooth()], trains=True))
    after = str(boundary.choose(0, [smooth()], trains=False))
    assert (before, training, after) == ("raw", "raw", "int4")


def test_guard_goes_back_to_raw_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    policy = CodecPolicy("int4", guard_every=2, guard_limit=0.01)
    with caplog.at_level(logging.WARNING, "pipecomm"):
        assert choices(policy, [smooth()], 5) == ["raw"] * 5
    (record,) = caplog.records
    text = record.getMessage()
    for part in ("stage 0, forward", "int4", "step 1", "0.01", "raw from now on"):
        assert part in text


def test_guard_measures_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    policy = CodecPolicy("int4", guard_every=3, guard_limit=0.05)
    boundary = BoundaryCodec(policy, Codec("int4"), "here")
    found = []
    for step in range(7):
        boundary.begin_step()
        # Ones are exact in 4 bits. Worse from the second step on; only the fourth is looked at.
        given = torch.ones(16, 64) if step == 0 else smooth()
        found.append(str(boundary.choose(0, [given], trains=True)))
    assert found == ["int4"] * 3 + ["raw"] * 4
    assert "in step 4" in caplog.text


def test_guard_leaves_a_good_codec_alone(caplog: pytest.LogCaptureFixture) -> None:
    policy = CodecPolicy("int4", guard_every=1, guard_limit=0.2)
    assert choices(policy, [smooth(), None, torch.arange(999)], 3) == ["int4"] * 3  # type: ignore[list-item]
    assert not caplog.records


def test_guard_takes_no_offence_at_values_that_are_not_finite() -> None:
    x = smooth()
    x[0, 0] = float("inf")
    policy = CodecPolicy("int4", guard_every=1, guard_limit=0.2)
    assert choices(policy, [x], 2) == ["int4"] * 2


def test_relative_error_is_that_of_the_l2_norm() -> None:
    x = smooth()
    codec = Codec("int8")
    back = codec.decode(codec.encode(x), torch.empty_like(x))
    assert relative_error(codec, x) == pytest.approx(((back - x).norm() / x.norm()).item())
    assert relative_error(Codec("raw"), x) == 0.0
    assert relative_error(codec, torch.zeros(4, 4)) == 0.0
