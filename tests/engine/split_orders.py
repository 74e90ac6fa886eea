"""Schedules for the tests of split backwards, beside those that have names."""

from __future__ import annotations

from pipecomm.schedule import Action, Kind, Placement, Schedule, build


def weights_last(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe whose weight gradients all come at the end."""
    kinds = (Kind.F, Kind.I, Kind.W)
    return Schedule.from_lists(
        "weights last",
        [
            [Action(kind, stage, m) for kind in kinds for m in range(num_microbatches)]
            for stage in range(num_stages)
        ],
    )


def mixed(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B in which every other microbatch has a whole backward."""
    plain = build("1f1b", num_stages, num_microbatches)
    return Schedule.from_lists("mixed", [_some_split(list(row)) for row in plain.ranks])


def whole_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stages down the ranks and up again, with whole backwards."""
    placement, numbers = Placement.v_shaped(2 * num_ranks, num_ranks), range(num_microbatches)
    lists = []
    for rank in range(num_ranks):
        down, up = placement.stages_of(rank)
        order = [(Kind.F, down), (Kind.F, up), (Kind.B, up), (Kind.B, down)]
        lists.append([Action(kind, stage, m) for kind, stage in order for m in numbers])
    return Schedule.from_lists("whole v", lists)


def _some_split(row: list[Action]) -> list[Action]:
    split: list[Action] = []
    for action in row:
        if action.kind is Kind.B and action.microbatch % 2:
            split += [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
        else:
            split.append(action)
    return split
