"""The command line's arguments: defaults, and what is refused before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pipecomm.app.arguments import AUTO_LINK, parse


def parsed(*words: str) -> argparse.Namespace:
    return parse(
        words, {name: lambda args: 0 for name in ("train", "doctor", "simulate", "replay")}
    )


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    return captured.err


def test_defaults_of_train_are_those_of_the_demo_on_the_real_path() -> None:
    args = parsed("train")
    assert (args.stages, args.codec, args.grad_codec, args.port, args.data) == (None,) * 5
    assert (args.link_mbps, args.link_latency_ms, args.compare, args.json) == (0, 0, False, False)
    assert (args.schedule, args.out) == ("1f1b", Path("out"))


def test_values_are_read() -> None:
    args = parsed("train", "--link-mbps", "12.5", "--stages", "3", "--data", "a b", "--json")
    assert (args.link_mbps, args.stages, args.data, args.json) == (12.5, 3, Path("a b"), True)
    assert parsed("train", "--link-mbps", "auto").link_mbps == AUTO_LINK


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--steps", "-3"),
        ("--steps", "2.5"),
        ("--stages", "two"),
        ("--seed", "-1"),
        ("--port", "0"),
        ("--port", "65536"),
        ("--port", "abc"),
        ("--link-mbps", "-1"),
        ("--link-mbps", "nan"),
        ("--link-mbps", "inf"),
        ("--link-mbps", "fast"),
        ("--link-latency-ms", "-0.1"),
        ("--learning-rate", "0"),
        ("--timeout-s", "0"),
    ],
)
def test_impossible_value_is_refused_with_option_and_value(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    text = refusal(capsys, "train", f"{option}={value}")
    assert f"argument {option}: expected" in text
    assert f"got {value!r}" in text


def test_unknown_option_or_command_or_abbreviation_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--stepz" in refusal(capsys, "train", "--stepz=3")
    assert "--step" in refusal(capsys, "train", "--step=3")
    assert "replays" in refusal(capsys, "replays")
    assert "COMMAND" in refusal(capsys)


def test_help_tells_options_defaults_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["train", "--help"]):
        with pytest.raises(SystemExit) as ended:
            parsed(*words)
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "3 another rank failed" in " ".join(text.split())
    assert "--grad-codec" in text
    assert "(default: 1f1b)" in text
    assert "default: None" not in text
    assert "default: False" not in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from pipecomm import __version__

    with pytest.raises(SystemExit):
        parsed("--version")
    assert capsys.readouterr().out == f"pipecomm {__version__}\n"
