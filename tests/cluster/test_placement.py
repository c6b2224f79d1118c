# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ranks ask of the nodes that Ray has."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.cluster import placement
from metrale_ray.cluster.placement import with_resources
from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Ray's nodes: two of 8 cores, and a head that holds no rank."""
    made: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 9.0}},
        {"Alive": True, "Resources": {}},
    ]
    monkeypatch.setattr(placement.ray, "nodes", lambda: made)
    return made


def test_ranks_share_the_cores_of_the_smallest_node(nodes: list[dict[str, Any]]) -> None:
    settled = with_resources(EngineConfig(model="m", ep_size=4), can_grow=True)
    assert (settled.device, settled.num_cpus_per_rank, settled.num_gpus_per_rank) == ("cpu", 4, None)


def test_no_rank_takes_more_cores_than_threads_are_allowed_and_a_given_number_is_taken_as_it_is(
    nodes: list[dict[str, Any]],
) -> None:
    settled = with_resources(EngineConfig(model="m", ep_size=4), can_grow=True, most_threads=3)
    assert settled.num_cpus_per_rank == 3
    given = EngineConfig(model="m", ep_size=4, num_cpus_per_rank=40)
    assert with_resources(given, can_grow=True, most_threads=3).num_cpus_per_rank == 40


def test_each_rank_takes_a_gpu_where_there_are_as_many(nodes: list[dict[str, Any]]) -> None:
    for node in nodes[:2]:
        node["Resources"]["GPU"] = 1.0
    settled = with_resources(EngineConfig(model="m", ep_size=2), can_grow=False)
    assert (settled.device, settled.num_gpus_per_rank) == ("cuda", 1.0)


def test_gpus_that_nobody_has_are_refused_at_once_where_no_node_can_come(nodes: list[dict[str, Any]]) -> None:
    config = EngineConfig(model="m", ep_size=2, device="cuda")
    with pytest.raises(ConfigError, match="no node has a GPU"):
        with_resources(config, can_grow=False)
    assert with_resources(config, can_grow=True).num_gpus_per_rank == 1.0  # and the placement waits for them
