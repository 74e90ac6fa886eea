"""What a step's parts cost: seconds, bytes and limits, from Python or a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipecomm.errors import ConfigError
from pipecomm.schedule.action import KINDS, Kind
from pipecomm.schedule.placement import Placement
from pipecomm.schedule.walk import Timing

__all__ = ["Costs", "PerStage", "expand", "read_costs", "timing_of"]

PerStage = float | Sequence[float]

_PER_STAGE = (
    *("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "update_s", "reduce_s"),
    *("activation_nbytes", "held_for_weights_nbytes", "weights_nbytes"),
)
_PER_LINK = (
    *("forward_transfer_s", "backward_transfer_s", "latency_s", "codec_s"),
    *("forward_nbytes", "backward_nbytes", "link_bytes_per_s"),
)


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs, in seconds; each value is a number or one number per place.

    forward_s, backward_s: compute, per stage (`num_stages` values).
    forward_transfer_s, backward_transfer_s: how long one message keeps a link busy, per link
        (`num_stages - 1` values; link k joins stages k and k+1). The two directions of a link
        do not disturb each other; the messages of one direction between the same two ranks
        follow one another. Stages on one rank hand over in no time.
    latency_s: from leaving the link to arrival, per link; several messages can be in it at once.
    overlap: False makes a rank stand still while it sends.
    slots: messages per direction that may travel before their receive is posted.
    backward_input_s, backward_weight_s: the two parts of a split backward, per stage; None is
        half of backward_s each, or what the other one leaves of it.
    update_s: an update among the actions (U), per stage.
    forward_nbytes, backward_nbytes, link_bytes_per_s: bytes of a message on the wire and the
        link's bandwidth, per link: their quotient adds to the transfer. None: no limit.
    codec_s: encoding and decoding of a message, per link, in line with its transfer.
    max_in_flight: messages of one direction between two ranks that may be on their way; 0: any.
    reduce_s: data-parallel reduction of a stage's gradients, per stage. It begins with the end of
        the stage's last backward; those of one rank follow one another, beside its compute.
    activation_nbytes: what a microbatch keeps from F to the end of B or I, per stage;
        held_for_weights_nbytes: what of it stays from I to W; None: all.
    weights_nbytes: of one version of a stage's weights, gradients and optimizer state aside.
    """

    forward_s: PerStage = 1.0
    backward_s: PerStage = 1.0
    forward_transfer_s: PerStage = 0.0
    backward_transfer_s: PerStage = 0.0
    latency_s: PerStage = 0.0
    overlap: bool = True
    slots: int = 0
    backward_input_s: PerStage | None = None
    backward_weight_s: PerStage | None = None
    update_s: PerStage = 0.0
    forward_nbytes: PerStage = 0.0
    backward_nbytes: PerStage = 0.0
    link_bytes_per_s: PerStage | None = None
    codec_s: PerStage = 0.0
    max_in_flight: int = 0
    reduce_s: PerStage = 0.0
    activation_nbytes: PerStage = 0.0
    held_for_weights_nbytes: PerStage | None = None
    weights_nbytes: PerStage = 0.0

    def on(self, placement: Placement) -> Costs:
        """These costs, of one stage on each of P ranks, when every stage is cut into v equal parts.

        A boundary between neighbouring ranks has the cost of their link; one around from the last
        rank to the first that of the most expensive one, as no cost says what is between them.
        """
        num_ranks = placement.num_ranks
        parts = placement.num_stages // num_ranks
        if parts == 1:
            return self
        changed: dict[str, Any] = {}
        for name in _PER_STAGE:
            value = getattr(self, name)
            if value is not None:
                whole = expand(name, value, num_ranks)
                changed[name] = (np.repeat(whole, parts) / parts).tolist()
        for name in _PER_LINK:
            value = getattr(self, name)
            if value is not None and not np.isscalar(value):
                changed[name] = _over_ranks(name, list(value), placement)
        return replace(self, **changed)


def _over_ranks(name: str, of_links: list[float], placement: Placement) -> list[float]:
    worst = (min if name == "link_bytes_per_s" else max)(of_links)
    pairs = [placement.hop_over(k, "forward")[-2:] for k in range(placement.num_boundaries)]
    return [of_links[min(pair)] if abs(pair[0] - pair[1]) == 1 else worst for pair in pairs]


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """The costs in a JSON file: an object with fields of Costs by their names.

    Raises ConfigError naming the field that is unknown or no number, OSError if unreadable.
    """
    where = os.fspath(path)
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"expected a JSON object of costs; got {error} in {where}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"expected a JSON object of costs; got {given!r:.60} in {where}")
    known = {field.name: field for field in fields(Costs)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"expected costs named {', '.join(known)}; got {name!r} in {where}")
        values = value if isinstance(value, list) and name in (*_PER_STAGE, *_PER_LINK) else [value]
        is_flag = name == "overlap"
        for one in values:
            if isinstance(one, bool) != is_flag or not isinstance(one, int | float):
                wanted = "true or false" if is_flag else "a number or a list of numbers"
                raise ConfigError(f"expected {wanted} for {name}; got {value!r} in {where}")
    return Costs(**given)


def timing_of(costs: Costs, num_stages: int) -> Timing:
    """The costs by kind, direction and stage. Raises ConfigError for costs that cannot be."""
    for name in ("slots", "max_in_flight"):
        count = getattr(costs, name)
        if not isinstance(count, int) or count < 0:
            raise ConfigError(f"expected {name} of 0 or more; got {count}")
    transfer_s, latency_s = np.zeros((2, num_stages)), np.zeros((2, num_stages))
    # What leaves stage k forward goes over link k, backward over link k - 1.
    ends = (slice(None, -1), slice(1, None))
    for direction, name in enumerate(("forward", "backward")):
        transfer_s[direction, ends[direction]] = _transfer_s(costs, name, num_stages - 1)
        latency_s[direction, ends[direction]] = expand("latency_s", costs.latency_s, num_stages - 1)
    compute_s = _compute_s(costs, num_stages)
    return Timing(
        compute_s, transfer_s, latency_s, costs.slots, costs.max_in_flight, not costs.overlap
    )


def _compute_s(costs: Costs, num_stages: int) -> npt.NDArray[np.float64]:
    seconds = np.zeros((len(KINDS), num_stages))
    whole_s = expand("backward_s", costs.backward_s, num_stages)
    seconds[Kind.F.index] = expand("forward_s", costs.forward_s, num_stages)
    seconds[Kind.B.index] = whole_s
    seconds[Kind.U.index] = expand("update_s", costs.update_s, num_stages)
    parts = {Kind.I: "backward_input_s", Kind.W: "backward_weight_s"}
    given = {
        kind: expand(name, getattr(costs, name), num_stages)
        for kind, name in parts.items()
        if getattr(costs, name) is not None
    }
    for kind, other in ((Kind.I, Kind.W), (Kind.W, Kind.I)):
        left_s = np.maximum(whole_s - given[other], 0.0) if other in given else whole_s / 2
        seconds[kind.index] = given.get(kind, left_s)
    return seconds


def _transfer_s(costs: Costs, direction: str, num_links: int) -> npt.NDArray[np.float64]:
    seconds = expand("codec_s", costs.codec_s, num_links)
    for name in (f"{direction}_transfer_s", f"{direction}_nbytes"):
        value = expand(name, getattr(costs, name), num_links)
        if name.endswith("_s"):
            seconds = seconds + value
        elif costs.link_bytes_per_s is not None:
            bandwidth = expand("link_bytes_per_s", costs.link_bytes_per_s, num_links)
            if not bandwidth.all():
                raise ConfigError("expected link_bytes_per_s above 0; got 0")
            seconds = seconds + value / bandwidth
    return seconds


def expand(name: str, value: PerStage, count: int) -> npt.NDArray[np.float64]:
    """One number for each of `count` places. Raises ConfigError for others than 0 and more."""
    given = np.array([value] if np.isscalar(value) else value, float)
    if not np.isscalar(value) and len(given) != count:
        raise ConfigError(f"expected one number or {count} of them for {name}; got {len(given)}")
    bad = given[~(np.isfinite(given) & (given >= 0))]
    if len(bad):
        unit = {"s": "seconds"}.get(name.rsplit("_", 1)[-1], "numbers")
        raise ConfigError(f"expected finite {unit} of 0 or more for {name}; got {bad[0]:g}")
    return np.broadcast_to(given, (count,)).copy() if np.isscalar(value) else given
