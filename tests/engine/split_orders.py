"""Schedules with split backwards for the tests, and the peak of what each keeps."""

from __future__ import annotations

from pipecomm.schedule import Action, Kind, Placement, Schedule, build


def of_lists(name: str, *rows: str) -> Schedule:
    """`rows` as in "0F0 0I0 0W0"."""
    return Schedule.from_lists(name, [map(Action.parse, row.split()) for row in rows])


def late_weights(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose rank k computes weight gradients k microbatches late, as ZB-H1 does."""
    lists = []
    for rank in range(num_stages):
        row: list[Action] = []
        warmup = min(num_stages - 1 - rank, num_microbatches)
        row += [Action(Kind.F, rank, m) for m in range(warmup)]
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                row.append(Action(Kind.F, rank, m + warmup))
            row.append(Action(Kind.I, rank, m))
            if m >= rank:
                row.append(Action(Kind.W, rank, m - rank))
        first_left = max(0, num_microbatches - rank)
        row += [Action(Kind.W, rank, m) for m in range(first_left, num_microbatches)]
        lists.append(row)
    return Schedule.from_lists("late weights", lists)


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


def v_shaped(num_ranks: int, num_microbatches: int) -> Schedule:
    """Stages down the ranks and up again; the weights of both wait for the end."""
    placement, numbers = Placement.v_shaped(2 * num_ranks, num_ranks), range(num_microbatches)
    lists = []
    for rank in range(num_ranks):
        down, up = placement.stages_of(rank)
        order = [(Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down)]
        order += [(Kind.W, up), (Kind.W, down)]
        lists.append([Action(kind, stage, m) for kind, stage in order for m in numbers])
    return Schedule.from_lists("split v", lists)


def _some_split(row: list[Action]) -> list[Action]:
    split: list[Action] = []
    for action in row:
        if action.kind is Kind.B and action.microbatch % 2:
            split += [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
        else:
            split.append(action)
    return split
