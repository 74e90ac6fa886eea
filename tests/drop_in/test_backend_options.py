"""BackendOptions, and codecs on the wire of the backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipecomm.drop_in import backend
from pipecomm.drop_in.backend import BackendOptions, register
from pipecomm.errors import ConfigError, MessageMismatchError, PipecommError
from tests.drop_in.backend_ranks import init, wait_for_all
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
        BackendOptions(inner="cpu:gloo"),
    )
    assert len({options.settings for options in all_options}) == len(all_options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"codec": "int3"}, "int3"),
        ({"grad_codec": "int3"}, "int3"),
        ({"min_nbytes": -1}, "-1"),
        ({"min_nbytes": "64k"}, "number of bytes.*'64k'"),
        ({"min_nbytes": 1.5}, "number of bytes.*1.5"),
        ({"min_nbytes": True}, "number of bytes.*True"),
        ({"min_nbytes": None}, "number of bytes.*None"),
        ({"min_nbytes": 1 << 64}, "number of bytes.*18446744073709551616"),
        ({"codec": 4}, "codec.*4"),
        ({"grad_codec": None}, "codec.*None"),
        ({"inner": "glue"}, "gloo, nccl.*glue"),
        ({"inner": "cpu:gloo,cuda:glue"}, "gloo, nccl.*cuda:glue"),
        ({"inner": "cpu:gloo,nccl"}, "cpu:gloo,cuda:nccl; got 'cpu:gloo,nccl'"),
        ({"inner": ""}, "gloo, nccl.*''"),
        ({"limits": 3}, "FlowLimits.*3"),
        ({"inner": ["gloo"]}, r"gloo.*\['gloo'\]"),
        ({"timeout": 5}, "timedelta.*5"),
        ({"timeout": timedelta(0)}, "more than 0 s.*timedelta"),
    ],
)
def test_option_that_is_not_known_is_a_config_error(
    arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        BackendOptions(**arguments)  # type: ignore[arg-type]


def test_collectives_are_gloos_where_torch_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert BackendOptions().inner == "gloo"
    for inner in ("nccl", "cuda:nccl"):
        with pytest.raises(ConfigError, match=r"with NCCL.*got torch .* without; name gloo"):
            BackendOptions(inner=inner)


def test_collectives_of_cuda_tensors_are_nccls_where_torch_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert BackendOptions().inner == "cpu:gloo,cuda:nccl"
    assert backend._parse_inner("cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backend._parse_inner("nccl") == {"cpu": "nccl", "cuda": "nccl"}


def _collectives_of_meta_tensors(rank: int, size: int) -> list[tuple[Any, ...]]:
    one, all_ = torch.empty(4, device="meta"), torch.empty(4 * size, device="meta")
    ones = [one] * size
    at_root = [ones] if rank == 0 else []
    return [
        ("allreduce", [one]),
        ("allreduce_coalesced", [one]),
        ("broadcast", [one], dist.BroadcastOptions()),
        ("reduce", [one], dist.ReduceOptions()),
        ("allgather", [ones], [one]),
        ("_allgather_base", all_, one),
        ("gather", at_root, [one], dist.GatherOptions()),
        ("scatter", [one], at_root, dist.ScatterOptions()),
        ("reduce_scatter", [one], [ones]),
        ("_reduce_scatter_base", one, all_),
        ("alltoall_base", all_, all_, [], []),
        ("alltoall", ones, ones),
    ]


def _inner_backends_by_device(rank: int, size: int, store_path: str) -> list[list[str]]:
    """Which inner backends there are after each of some calls; torch's fake one is meta's."""
    made: list[str] = []

    def recording(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            made.append(name)
            return make(*arguments)

        return recorded

    def make_fake(members: Any, timeout: timedelta) -> Any:
        return torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size)

    backend._INNER_BACKENDS["gloo"] = recording("gloo", backend._make_gloo)
    backend._INNER_BACKENDS["fake"] = recording("fake", make_fake)
    seen = []
    init(rank, size, store_path, pg_options=BackendOptions(inner="meta:fake"))
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    seen.append(list(made))
    for name, *arguments in _collectives_of_meta_tensors(rank, size):
        getattr(group, name)(*arguments).wait()
    seen.append(list(made))
    total = torch.full((4,), rank + 1.0)
    dist.all_reduce(total)
    dist.barrier()
    assert total.tolist() == [3.0] * 4
    seen.append(list(made))
    dist.destroy_process_group()

    made.clear()
    backend._connect = lambda *_: None  # as between ranks of two users
    init(rank, size, store_path + ".unreachable", pg_options=BackendOptions(inner="meta:fake"))
    seen.append(list(made))
    dist.group.WORLD._get_backend(torch.device("cpu")).send(
        [torch.empty(4, device="meta")], 1 - rank, 0
    ).wait()
    seen.append(list(made))
    wait_for_all(rank, size, store_path)  # gloo may still connect on the other rank
    return seen


def test_inner_backend_is_that_of_the_tensors_device_and_made_at_its_first_use() -> None:
    for seen in spawn_ranks(2, _inner_backends_by_device):
        assert seen == [[], ["fake"], ["fake", "gloo"], ["gloo"], ["gloo", "fake"]]


def test_threshold_in_the_environment_that_is_no_number_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPECOMM_MIN_NBYTES", "64k")
    with pytest.raises(ConfigError, match="64k"):
        BackendOptions()


@pytest.mark.parametrize("variable", ["PIPECOMM_CODEC", "PIPECOMM_GRAD_CODEC"])
def test_codec_in_the_environment_that_is_not_known_is_named_with_its_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "int3")
    with pytest.raises(ConfigError, match=f"{variable}.*int3"):
        BackendOptions()


def test_foreign_options_are_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BackendOptions.*dict"):
        init(0, 1, str(tmp_path / "store"), pg_options={"codec": "int4"})


Errors = dict[str, float]


@dataclass(frozen=True)
class _Outcome:
    """What a rank saw: texts of refusals, and by group the largest errors of what it received."""

    refusals: list[str]
    errors: dict[str, Errors]


def _codecs_on_the_wire(rank: int, size: int, store_path: str) -> _Outcome:
    different = BackendOptions(codec="int4" if rank else "raw")
    with pytest.raises(PipecommError) as by_options:
        init(rank, size, store_path + ".different", pg_options=different)
    os.environ["PIPECOMM_MIN_NBYTES"] = str(1024 + rank)
    with pytest.raises(PipecommError) as by_environment:
        init(rank, size, store_path + ".environment")
    os.environ.update(PIPECOMM_CODEC="int4", PIPECOMM_GRAD_CODEC="int8", PIPECOMM_MIN_NBYTES="1024")
    init(rank, size, store_path)
    errors = {"environment": _errors_by_kind(rank, dist.group.WORLD)}
    _shapes_must_agree(rank)
    for name, options in (
        ("raw", BackendOptions(codec="raw", grad_codec="raw")),
        ("forward only", BackendOptions(grad_codec="raw")),
    ):
        group = dist.new_group([0, 1], pg_options=options)
        errors[name] = _errors_by_kind(rank, group)
    dist.barrier()
    dist.destroy_process_group()
    return _Outcome([str(by_options.value), str(by_environment.value)], errors)


def _errors_by_kind(rank: int, group: dist.ProcessGroup) -> Errors:
    """Largest errors of what this rank receives."""
    torch.manual_seed(0)
    errors: Errors = {}
    for name, sent in (
        ("floats", torch.randn(64, 64)),
        ("integers", torch.arange(4096).reshape(64, 64)),
        ("doubles", torch.randn(64, 64, dtype=torch.float64)),
        ("small", torch.randn(8)),
    ):
        got = torch.zeros_like(sent)
        work = dist.isend(sent, 1 - rank, group)
        dist.recv(got, 1 - rank, group)
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
def outcomes() -> list[_Outcome]:
    return spawn_ranks(2, _codecs_on_the_wire)


def test_ranks_whose_options_differ_refuse_each_other(outcomes: list[_Outcome]) -> None:
    assert all("int4" in of_rank.refusals[0] for of_rank in outcomes)
    assert any("raw" in of_rank.refusals[0] for of_rank in outcomes)


def test_ranks_whose_environments_differ_refuse_each_other(outcomes: list[_Outcome]) -> None:
    for text in ("min_nbytes=1024", "min_nbytes=1025"):
        assert any(text in of_rank.refusals[1] for of_rank in outcomes)


def test_codec_holds_for_large_float_messages_of_its_direction(outcomes: list[_Outcome]) -> None:
    backward, forward = (of_rank.errors["environment"] for of_rank in outcomes)
    # Over a range of about six standard deviations half a step is near 0.2 with four bits, and
    # near 0.012 with eight.
    assert 0.02 < forward["floats"] < 0.3
    assert 0.002 < backward["floats"] < 0.02
    for errors in (forward, backward):
        assert (errors["integers"], errors["doubles"], errors["small"]) == (0, 0.0, 0.0)


def test_groups_have_codecs_of_their_own(outcomes: list[_Outcome]) -> None:
    to_lower, to_higher = (of_rank.errors for of_rank in outcomes)
    assert to_higher["raw"]["floats"] == to_lower["raw"]["floats"] == 0.0
    assert to_higher["forward only"]["floats"] > 0.0
    assert to_lower["forward only"]["floats"] == 0.0
