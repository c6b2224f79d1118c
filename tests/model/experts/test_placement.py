# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.experts.placement import experts_of, rank_of


@pytest.mark.parametrize(
    ("num_experts", "world", "counts"),
    [
        (8, 3, [3, 3, 2]),
        (5, 4, [2, 1, 1, 1]),
        (60, 8, [8, 8, 8, 8, 7, 7, 7, 7]),
        (2, 4, [1, 1, 0, 0]),
        (1, 2, [1, 0]),
        (8, 1, [8]),
    ],
)
def test_leftovers_go_to_the_first_ranks_one_each(num_experts: int, world: int, counts: list[int]) -> None:
    assert [len(experts_of(num_experts, rank, world)) for rank in range(world)] == counts


@given(num_experts=st.integers(0, 300), world=st.integers(1, 70))
def test_every_expert_lives_on_exactly_one_rank_and_shares_differ_by_one_at_most(num_experts: int, world: int) -> None:
    runs = [experts_of(num_experts, rank, world) for rank in range(world)]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    assert all(rank_of(expert, num_experts, world) == rank for rank, run in enumerate(runs) for expert in run)


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="not in a group"):
        experts_of(8, rank, world)


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_does_not_exist_has_no_rank(expert: int) -> None:
    with pytest.raises(ValueError, match="not one of 8"):
        rank_of(expert, 8, 2)
