"""Where stages are and who is next to whom: drawn by hand, and what holds for any placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomm.errors import ConfigError
from pipecomm.schedule import Direction, Hop, Placement
from tests.schedule.examples import schedule_of

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.integers(1, 5))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=6))
    return Placement(tuple(draw(st.permutations([*range(num_ranks), *more]))))


def test_linear_has_stage_k_on_rank_k() -> None:
    placement = Placement.linear(4, 4)
    assert placement.rank_of == (0, 1, 2, 3)
    assert (placement.num_stages, placement.num_ranks, placement.num_boundaries) == (4, 4, 3)


def test_looped_goes_around_the_ranks() -> None:
    placement = Placement.looped(6, 3)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2)
    assert placement.stages_of(1) == (1, 4)
    # From the last rank to the first, where the second round begins.
    assert placement.hop_over(2, "forward") == Hop("forward", 2, 2, 3, 2, 0)
    assert placement.peers_of(0) == (1, 2)


def test_v_shaped_goes_down_and_up_again() -> None:
    placement = Placement.v_shaped(6, 3)
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert placement.stages_of(0) == (0, 5)
    assert not placement.hop_over(2, "forward").is_message
    assert placement.peers_of(0) == (1,)
    assert (placement.first_rank, placement.last_rank) == (0, 0)


def test_lists_imply_their_placement() -> None:
    assert schedule_of("3F0 0F0", "1F0", "2F0").placement.rank_of == (0, 1, 2, 0)


def test_looped_with_one_stage_per_rank_is_linear() -> None:
    assert Placement.looped(3, 3) == Placement.linear(3, 3)


@pytest.mark.parametrize(
    ("make", "num_stages", "num_ranks", "text"),
    [
        (Placement.linear, 4, 2, "as many stages as ranks; got 4 stages on 2 ranks"),
        (Placement.looped, 5, 2, "same number of stages on every rank; got 5 stages on 2"),
        (Placement.looped, 2, 4, "same number of stages on every rank; got 2 stages on 4"),
        (Placement.v_shaped, 3, 3, "two stages on every rank; got 3 stages on 3 ranks"),
    ],
)
def test_size_that_a_placement_has_no_form_for_is_refused(
    make: object, num_stages: int, num_ranks: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make(num_stages, num_ranks)  # type: ignore[operator]


@pytest.mark.parametrize("rank_of", [(), (1,), (0, 2), (-1, 0), (0, 0, 2)])
def test_rank_without_a_stage_is_refused(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a stage on every rank"):
        Placement(rank_of)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (("0F0 1F0", "1F1"), "stage 1 on one rank; got it on 0 and 1"),
        (("0F0", "2F0"), "stages 0 to 2; got none of 1"),
        (("0F0", "", "1F0"), "a stage on every rank"),
    ],
)
def test_lists_that_imply_no_placement_are_refused(rows: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _ = schedule_of(*rows).placement


@given(placements())
def test_stages_of_all_ranks_are_all_stages(placement: Placement) -> None:
    held = [stage for rank in range(placement.num_ranks) for stage in placement.stages_of(rank)]
    assert sorted(held) == list(range(placement.num_stages))
    for rank in range(placement.num_ranks):
        assert {placement.rank_of[stage] for stage in placement.stages_of(rank)} == {rank}


@given(placements())
def test_what_a_stage_makes_its_neighbour_takes_over_the_same_hop(placement: Placement) -> None:
    for hop in placement.hops:
        assert placement.hop_from(hop.source, hop.direction) == hop
        assert placement.hop_to(hop.target, hop.direction) == hop
        assert placement.hop_over(hop.boundary, hop.direction) == hop
        assert (hop.sender, hop.receiver) == (
            placement.rank_of[hop.source],
            placement.rank_of[hop.target],
        )
        assert {hop.source, hop.target} == {hop.boundary, hop.boundary + 1}
        assert hop.is_message == (hop.sender != hop.receiver)
    assert len(placement.hops) == 2 * placement.num_boundaries


@given(placements())
def test_nothing_comes_to_the_first_stage_and_leaves_the_last(placement: Placement) -> None:
    last = placement.num_stages - 1
    assert placement.hop_to(0, "forward") is placement.hop_from(last, "forward") is None
    assert placement.hop_from(0, "backward") is placement.hop_to(last, "backward") is None
    assert placement.first_rank == placement.rank_of[0]
    assert placement.last_rank == placement.rank_of[last]


@given(placements())
def test_gradients_go_back_over_the_way_of_the_activations(placement: Placement) -> None:
    for boundary in range(placement.num_boundaries):
        down, up = (placement.hop_over(boundary, direction) for direction in DIRECTIONS)
        assert (down.source, down.target) == (up.target, up.source)
        assert down.channel != up.channel


@given(placements())
def test_peers_are_those_that_messages_join(placement: Placement) -> None:
    for rank in range(placement.num_ranks):
        assert placement.peers_of(rank) == tuple(
            peer
            for peer in range(placement.num_ranks)
            if any({hop.sender, hop.receiver} == {rank, peer} for hop in placement.hops)
            and peer != rank
        )
