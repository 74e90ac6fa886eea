"""BackendOptions, and codecs on the wire of the backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipecomm.backend import BackendOptions, register
from pipecomm.errors import ConfigError, MessageMismatchError, PipecommError
from tests.backend_ranks import init
from tests.ranks import spawn_ranks


def test_registering_again_changes_nothing() -> None:
    before = list(dist.Backend.backend_list)
    register()
    assert dist.Backend.backend_list == before
    assert before.count("pipecomm") == 1


def test_registering_leaves_the_default_backend_of_cpu_alone() -> None:
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def test_options_default_to_raw() -> None:
    options = BackendOptions()
    assert (str(options.codec), str(options.grad_codec)) == ("raw", "raw")


def test_options_come_from_the_environment_where_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_CODEC", "int4")
    monkeypatch.setenv("PIPECOMM_GRAD_CODEC", "int8")
    monkeypatch.setenv("PIPECOMM_MIN_NBYTES", "128")
    assert BackendOptions().settings == BackendOptions("int4", "int8", 128).settings
    assert BackendOptions(codec="raw").settings == BackendOptions("raw", "int8", 128).settings


def test_options_that_differ_have_settings_that_differ() -> None:
    all_options = (
        BackendOptions(),
        BackendOptions(codec="int4"),
        BackendOptions(grad_codec="int4"),
        BackendOptions(codec="int8:group=32"),
        BackendOptions(min_nbytes=1),
    )
    assert len({options.settings for options in all_options}) == len(all_options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"codec": "int3"}, "int3"),
        ({"grad_codec": "int3"}, "int3"),
        ({"min_nbytes": -1}, "-1"),
        ({"inner": "glue"}, "gloo.*glue"),
    ],
)
def test_option_that_is_not_known_is_a_config_error(
    arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        BackendOptions(**arguments)  # type: ignore[arg-type]


def test_threshold_in_the_environment_that_is_no_number_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_MIN_NBYTES", "64k")
    with pytest.raises(ConfigError, match="64k"):
        BackendOptions()


def test_foreign_options_are_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BackendOptions.*dict"):
        init(0, 1, str(tmp_path / "store"), pg_options={"codec": "int4"})


def _codecs_on_the_wire(rank: int, size: int, store_path: str) -> tuple[str, dict[str, float]]:
    different = BackendOptions(codec="int4" if rank else "raw")
    with pytest.raises(PipecommError) as caught:
        init(rank, size, store_path + ".different", pg_options=different)
    init(rank, size, store_path, pg_options=BackendOptions(codec="int4", min_nbytes=1024))
    errors = _errors_by_kind(rank)
    _shapes_must_agree(rank)
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value), errors


def _errors_by_kind(rank: int) -> dict[str, float]:
    """Largest errors of what this rank receives."""
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    for name, sent in (
        ("floats", torch.randn(64, 64)),
        ("integers", torch.arange(4096).reshape(64, 64)),
        ("small", torch.randn(8)),
    ):
        got = torch.zeros_like(sent)
        work = dist.isend(sent, 1 - rank)
        dist.recv(got, 1 - rank)
        work.wait()
        errors[name] = (got - sent).abs().max().item()
    return errors


def _shapes_must_agree(rank: int) -> None:
    """Groups lie inside rows, so a quantized message has to be received in the sender's shape."""
    if rank == 0:
        dist.isend(torch.randn(64, 64), 1)
    else:
        with pytest.raises(MessageMismatchError, match=r"64.*128|128.*64"):
            dist.recv(torch.zeros(32, 128), 0)


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[str, dict[str, float]]]:
    return spawn_ranks(2, _codecs_on_the_wire)


def test_ranks_whose_options_differ_refuse_each_other(
    outcomes: list[tuple[str, dict[str, float]]],
) -> None:
    assert any("int4" in text and "raw" in text for text, _ in outcomes)


def test_codec_holds_for_large_float_messages_of_its_direction_only(
    outcomes: list[tuple[str, dict[str, float]]],
) -> None:
    (_, backward), (_, forward) = outcomes
    assert backward == {"floats": 0.0, "integers": 0, "small": 0.0}
    # Four bits over a range of about six standard deviations: half a step is near 0.2.
    assert 0.01 < forward["floats"] < 0.3
    assert (forward["integers"], forward["small"]) == (0, 0.0)
