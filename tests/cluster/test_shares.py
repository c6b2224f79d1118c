# SPDX-License-Identifier: MIT OR Apache-2.0
"""The cores of each rank: what nodes offer, what others leave, and what processes may use there."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.cluster import shares, unreserved
from metrale_ray.cluster.shares import first_share, largest_share, with_threads, with_what_is_free
from metrale_ray.config import PLACEMENTS, EngineConfig
from metrale_ray.cores import Usable


def config(ep_size: int, placement: str = "PACK", **settings: Any) -> EngineConfig:
    return EngineConfig(model="m", ep_size=ep_size, placement=placement, **settings)


def offers(*cpus: float, gpus: float = 0) -> list[dict[str, float]]:
    return [{"CPU": each, "GPU": gpus} for each in cpus]


@pytest.mark.parametrize(
    ("placement", "ep_size", "cpus", "share"),
    [
        ("PACK", 2, (64,), 32),
        ("PACK", 3, (64,), 21),
        ("PACK", 4, (8, 9), 4),
        ("PACK", 2, (64, 8), 32),  # both on the large one
        ("PACK", 5, (4,), 0),
        ("PACK", 1, (), 0),
        ("STRICT_PACK", 2, (16, 9, 9), 8),
        ("STRICT_PACK", 3, (2, 2), 0),
        ("STRICT_SPREAD", 2, (64, 8, 1), 8),
        ("STRICT_SPREAD", 3, (64, 8), 0),
        ("SPREAD", 2, (64, 8), 8),  # one on each, which is what it is for
        ("SPREAD", 3, (64, 8), 8),
        ("SPREAD", 4, (8, 9), 4),
        ("PACK", 2, (1.5, 1.0), 1),
    ],
)
def test_ranks_share_what_the_nodes_offer_as_the_placement_lets_them(
    placement: str, ep_size: int, cpus: tuple[float, ...], share: int
) -> None:
    assert largest_share(config(ep_size, placement), offers(*cpus)) == share


def test_a_rank_is_where_its_gpu_is() -> None:
    with_gpus = config(2, num_gpus_per_rank=1.0)
    assert largest_share(with_gpus, offers(64, 8, gpus=1)) == 8
    assert largest_share(with_gpus, offers(64, gpus=2)) == 32
    assert largest_share(with_gpus, [*offers(64), *offers(8, gpus=2)]) == 4


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["PACK", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_one_core_more_than_the_share_has_no_room(cpus: list[int], ep_size: int, placement: str) -> None:
    share = largest_share(config(ep_size, placement), offers(*cpus))

    def room(num_cpus: int) -> int:
        held = [each // num_cpus for each in cpus]
        return {"PACK": sum(held), "STRICT_PACK": max(held), "STRICT_SPREAD": sum(each > 0 for each in held)}[placement]

    assert share == 0 or room(share) >= ep_size
    assert room(share + 1) < ep_size


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nodes_that_may_come_are_taken_to_be_like_those_that_are_there(placement: str) -> None:
    assert first_share(config(3, placement), offers(2)) == 1
    assert first_share(config(4, "STRICT_SPREAD"), offers(8, 8)) == 4
    assert first_share(config(4, placement), []) == 1


# What others leave


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray's tables: two nodes of 8 cores, of which `groups` hold some and others `used` in all."""
    state = SimpleNamespace(groups={}, used=0.0)
    cpus = {"a": 8.0, "b": 8.0}
    alive = [{"NodeID": name, "Alive": True, "Resources": {"CPU": num}} for name, num in cpus.items()]
    ray = SimpleNamespace(nodes=lambda: alive, available_resources=lambda: {"CPU": 16.0 - state.used})
    monkeypatch.setattr(shares, "ray", ray)
    monkeypatch.setattr(unreserved, "ray", ray)
    monkeypatch.setattr(unreserved, "placement_group_table", lambda: state.groups)
    return state


def group(num_cpus: float, node: str) -> dict[str, Any]:
    return {"state": "CREATED", "bundles": {0: {"CPU": num_cpus}}, "bundles_to_node_id": {0: node}}


def test_ranks_take_what_others_leave_them(nodes: SimpleNamespace) -> None:
    nodes.groups, nodes.used = {"1": group(3, "b")}, 3.0
    fewer = with_what_is_free(config(2, "STRICT_SPREAD", num_cpus_per_rank=8))
    assert fewer is not None
    assert fewer.num_cpus_per_rank == 5
    assert with_what_is_free(config(1, num_cpus_per_rank=8)) is None  # there is one node with 8


def test_cores_that_are_used_nobody_says_where_are_missing_everywhere(nodes: SimpleNamespace) -> None:
    nodes.groups, nodes.used = {"1": group(3, "b")}, 4.0
    fewer = with_what_is_free(config(2, "STRICT_SPREAD", num_cpus_per_rank=8))
    assert fewer is not None
    assert fewer.num_cpus_per_rank == 4


def test_where_no_core_is_left_for_every_rank_nothing_is_taken(nodes: SimpleNamespace) -> None:
    nodes.used = 16.0
    assert with_what_is_free(config(2, num_cpus_per_rank=8)) is None
    nodes.used = 0.0
    assert with_what_is_free(config(2, num_cpus_per_rank=8)) is None  # they only have to wait


# Threads


def threads(num_cpus: float, places: str, usable: dict[str, Usable], **more: Any) -> int:
    """Of each rank; `places` is each one's node."""
    settled = with_threads(
        config(len(places), num_cpus_per_rank=num_cpus), list(places), usable, **{"by_choice": False, **more}
    )
    return settled.threads_per_rank


def test_each_rank_has_as_many_threads_as_its_part_of_the_least_node_has_cores() -> None:
    usable = {"a": Usable(16, 8), "b": Usable(6, 6)}
    assert threads(8, "ab", usable) == 6
    assert threads(8, "aab", usable) == 4
    assert threads(8, "aabb", usable) == 3
    assert threads(2, "ab", usable) == 2
    assert threads(8, "aaaaaaaaab", usable) == 1


def test_a_number_that_was_asked_for_may_be_of_hyperthreads_but_of_no_more_than_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert threads(8, "aa", {"a": Usable(16, 8)}, by_choice=True) == 8
    assert caplog.text == ""
    assert threads(8, "aa", {"a": Usable(10.5, 8)}, by_choice=True) == 5
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (
            logging.WARNING,
            "each rank computes with 5 threads, not 8: there is a node where 2 may use 10.5 CPUs of 8 cores",
        )
    ]


def test_a_limit_on_threads_holds_whoever_gave_the_number(caplog: pytest.LogCaptureFixture) -> None:
    usable = {"a": Usable(16, 16)}
    assert threads(8, "aa", usable, most_threads=3) == 3
    assert threads(8, "aa", usable, most_threads=3, by_choice=True) == 3
    assert threads(8, "aa", usable, most_threads=30) == 8
    assert caplog.text == ""


def test_what_was_given_stays_as_it_is_where_it_can_be_had() -> None:
    usable = {"a": Usable(4, 4)}
    for num_cpus in (0.5, 1, 1.5, 4):
        given = config(1, num_cpus_per_rank=num_cpus)
        assert with_threads(given, ["a"], usable, by_choice=True, most_threads=8) == given
