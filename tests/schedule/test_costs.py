"""Costs: what reaches which place, files, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from pipecomm.errors import ConfigError
from pipecomm.schedule import Costs, Kind, Placement, build, read_costs
from pipecomm.schedule.costs import timing_of


def test_each_link_has_its_own_transfer_latency_bandwidth_and_codec() -> None:
    costs = Costs(
        forward_transfer_s=[1.0, 2.0], latency_s=[0.1, 0.2], codec_s=[0.5, 0.25],
        forward_nbytes=100, backward_nbytes=[10, 20], link_bytes_per_s=[10, 20],
    )  # fmt: skip
    timing = timing_of(costs, 3)
    # Forward from stages 0 and 1, backward from 1 and 2.
    assert timing.transfer_s[0].tolist() == [1 + 10 + 0.5, 2 + 5 + 0.25, 0]
    assert timing.transfer_s[1].tolist() == [0, 1 + 0.5, 1 + 0.25]
    assert timing.latency_s.tolist() == [[0.1, 0.2, 0], [0, 0.1, 0.2]]


def test_bytes_cost_nothing_without_a_bandwidth() -> None:
    assert not timing_of(Costs(forward_nbytes=100, backward_nbytes=100), 2).transfer_s.any()


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, (1.5, 1.5)),
        ({"backward_weight_s": 1.0}, (2.0, 1.0)),
        ({"backward_input_s": 0.5}, (0.5, 2.5)),
        ({"backward_input_s": 4.0}, (4.0, 0.0)),
        ({"backward_input_s": 1.0, "backward_weight_s": 1.0}, (1.0, 1.0)),
    ],
)
def test_part_of_a_backward_that_is_not_given_is_what_the_other_leaves(
    given: dict[str, float], parts: tuple[float, float]
) -> None:
    compute_s = timing_of(Costs(backward_s=3.0, **given), 1).compute_s
    assert (compute_s[Kind.I.index, 0], compute_s[Kind.W.index, 0]) == parts


def test_stage_cut_in_two_costs_half_on_each_and_links_stay_where_they_are() -> None:
    costs = Costs([2.0, 4.0], 6.0, [1.0], latency_s=0.5, activation_nbytes=[8, 4])
    folded = costs.on(Placement.v_shaped(4, 2))
    assert folded.forward_s == [1.0, 1.0, 2.0, 2.0]
    assert folded.backward_s == [3.0] * 4
    assert folded.activation_nbytes == [4, 4, 2, 2]
    assert folded.forward_transfer_s == [1.0, 1.0, 1.0]
    assert folded.latency_s == 0.5
    around = Costs(forward_transfer_s=[1.0, 3.0], link_bytes_per_s=[9.0, 5.0])
    looped = around.on(Placement.looped(6, 3))
    assert looped.forward_transfer_s == [1.0, 3.0, 3.0, 1.0, 3.0]
    assert looped.link_bytes_per_s == [9.0, 5.0, 5.0, 9.0, 5.0]
    assert costs.on(Placement.linear(2, 2)) is costs


def test_costs_of_a_file_are_those_of_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward_s": [1, 2], "latency_s": 0.5, "overlap": False}))
    assert read_costs(path) == Costs([1, 2], latency_s=0.5, overlap=False)


def test_every_field_can_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    given = {f.name: True if f.name == "overlap" else 1 for f in fields(Costs)}
    path.write_text(json.dumps(given))
    build("gpipe", 2, 2).simulate(read_costs(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a JSON object of costs; got .* in .*costs.json"),
        ("[1]", r"a JSON object of costs; got \[1\]"),
        ('{"forwards": 1}', "costs named forward_s, .*; got 'forwards'"),
        ('{"forward_s": "1"}', "a number or a list of numbers for forward_s; got '1'"),
        ('{"forward_s": [1, true]}', "a number or a list of numbers for forward_s"),
        ('{"slots": [1]}', r"a number .* for slots; got \[1\]"),
        ('{"overlap": 1}', "true or false for overlap; got 1"),
    ],
)
def test_file_that_is_no_costs_says_which_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (Costs(link_bytes_per_s=0.0, forward_nbytes=1), "link_bytes_per_s above 0; got 0"),
        (Costs(max_in_flight=-1), "max_in_flight of 0 or more; got -1"),
        (Costs(slots=1.5), "slots of 0 or more; got 1.5"),  # type: ignore[arg-type]
        (Costs(latency_s=[0.1]), "2 of them for latency_s; got 1"),
        (Costs(codec_s=-1), "seconds of 0 or more for codec_s; got -1"),
        (Costs(forward_nbytes=-1), "numbers of 0 or more for forward_nbytes; got -1"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: Costs, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        timing_of(costs, 3)
