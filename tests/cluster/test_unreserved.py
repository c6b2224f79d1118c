# SPDX-License-Identifier: MIT OR Apache-2.0
"""What nodes have left outside of placement groups, from tables as Ray gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from metrale_ray.cluster import unreserved
from metrale_ray.cluster.unreserved import free_cpus, largest_rest


def node(name: str, cpus: float | None, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {} if cpus is None else {"CPU": cpus, "memory": 5.0}}


def group(bundles: dict[int, dict[str, float]], places: dict[int, str], state: str = "CREATED") -> dict[str, Any]:
    return {"state": state, "bundles": bundles, "bundles_to_node_id": places}


@pytest.mark.parametrize(
    ("nodes", "groups", "rest"),
    [
        ([], [], 0.0),
        ([node("a", 2.0)], [], 2.0),
        ([node("a", None)], [], 0.0),
        ([node("a", 8.0, alive=False), node("b", 1.0)], [], 1.0),
        ([node("a", 2.0)], [group({0: {"CPU": 1.0}, 1: {"CPU": 1.0}}, {0: "a", 1: "a"})], 0.0),
        ([node("a", 2.0)], [group({0: {"CPU": 0.5}, 1: {"CPU": 0.5}}, {0: "a", 1: "a"})], 1.0),
        ([node("a", 4.0), node("b", 2.0)], [group({0: {"CPU": 3.0}, 1: {"GPU": 1.0}}, {0: "a", 1: "b"})], 2.0),
        ([node("a", 2.0)], [group({0: {"CPU": 2.0}}, {0: "a"}, "REMOVED")], 2.0),
        ([node("a", 2.0)], [group({0: {"CPU": 2.0}}, {0: ""}, "PENDING")], 2.0),
        ([node("a", 3.0)], [group({0: {"CPU": 1.0}}, {0: "a"}), group({0: {"CPU": 1.5}}, {0: "a"})], 0.5),
    ],
)
def test_the_most_that_one_node_has_left(nodes: list[Any], groups: list[Any], rest: float) -> None:
    assert largest_rest(nodes, groups) == rest


def test_what_tasks_use_somewhere_is_taken_off_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = SimpleNamespace(
        nodes=lambda: [node("a", 4.0), node("b", 2.0), node("c", 9.0, alive=False)],
        available_resources=lambda: {"CPU": 2.5},
    )
    groups = {"g": group({0: {"CPU": 1.0}}, {0: "b"})}
    monkeypatch.setattr(unreserved, "ray", tables)
    monkeypatch.setattr(unreserved, "placement_group_table", lambda: groups)
    assert free_cpus() == {"a": 1.5, "b": 0.0}  # 5 are in no group, and 2.5 of them are free
    tables.available_resources = lambda: {"CPU": 5.0}
    assert free_cpus() == {"a": 4.0, "b": 1.0}
    tables.available_resources = dict  # Ray leaves out what there is nothing of
    assert free_cpus() == {"a": 0.0, "b": 0.0}
