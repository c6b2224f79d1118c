# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a Ray's nodes have left outside of placement groups, which are kept for their owners, used or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

CPU = "CPU"


def most_unreserved_cpus() -> float:
    """The most CPUs that any one node has outside of placement groups."""
    return largest_rest(ray.nodes(), placement_group_table().values())


def free_cpus() -> dict[str, float]:
    """At least so many CPUs are free on each node, by Ray's id.

    Ray's tables tell of each placement group where it is, of all else that is used only how much there is altogether:
    that is taken off every node.
    """
    rests = unreserved(ray.nodes(), placement_group_table().values())
    elsewhere = max(0.0, sum(rests.values()) - ray.available_resources().get(CPU, 0.0))
    return {node: max(0.0, rest - elsewhere) for node, rest in rests.items()}


def largest_rest(nodes: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> float:
    """As `most_unreserved_cpus`, from Ray's tables of nodes and of placement groups; 0.0 without a node."""
    return max(unreserved(nodes, groups).values(), default=0.0)


def unreserved(nodes: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The CPUs of each node outside of placement groups, by its id, from Ray's tables."""
    rests = {node["NodeID"]: node["Resources"].get(CPU, 0.0) for node in nodes if node["Alive"]}
    for group in groups:
        if group["state"] == "REMOVED":
            continue
        for index, node in group["bundles_to_node_id"].items():
            if node in rests:  # empty until it is placed
                rests[node] -= group["bundles"][index].get(CPU, 0.0)
    return rests
