# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ranks need of the nodes, and, where they cannot have it, what was asked for, offered and missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from metrale_ray.cluster.shares import GPU, first_share
from metrale_ray.cluster.unreserved import CPU
from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError


def with_resources(config: EngineConfig, *, can_grow: bool, most_threads: int | None = None) -> EngineConfig:
    """The configuration with device, cores and GPUs per rank settled from what the nodes offer.

    `can_grow`: nodes may still come, so that the placement is what waits for GPUs, and says what is missing.
    `most_threads`: no rank needs more cores, None for no limit.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(CPU, 0.0) > 0]
    changes: dict[str, Any] = {}
    gpus = sum(node.get(GPU, 0.0) for node in nodes)
    device = config.device if config.device != "auto" else ("cuda" if gpus >= config.ep_size else "cpu")
    changes["device"] = device
    if device.startswith("cuda") and gpus == 0 and not can_grow:
        raise ConfigError(f"device is {device!r}, and no node has a GPU; use cpu, or leave it out")
    if config.num_gpus_per_rank is None and device.startswith("cuda"):
        changes["num_gpus_per_rank"] = 1.0
    config = dataclasses.replace(config, **changes)
    if config.num_cpus_per_rank is None:
        share = first_share(config, nodes)
        config = dataclasses.replace(config, num_cpus_per_rank=min(share, most_threads or share))
    return config


def node_ids(group: PlacementGroup) -> list[str]:
    """Ray's id of each rank's node, in rank order. `group` has been placed."""
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [placed[rank] for rank in range(len(placed))]


def node_addresses(ids: Sequence[str]) -> list[str]:
    """The address of each of these nodes, in their order, from Ray's tables."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [addresses[node_id] for node_id in ids]


def lacking(config: EngineConfig, bundle: dict[str, float]) -> list[str]:
    """What all nodes together have too little of."""
    missing = []
    for name, amount in bundle.items():
        total = sum(node["Resources"].get(name, 0.0) for node in ray.nodes() if node["Alive"])
        if amount * config.ep_size > total:
            missing.append(f"{amount * config.ep_size - total:g} {name}")
    return missing


def unplaceable(config: EngineConfig, bundle: dict[str, float], hopeless: bool) -> str:
    """What was asked for, what the nodes offer, and what is missing."""
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    offers = "; ".join(
        f"{node['NodeManagerAddress']}: " + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle)
        for node in ray.nodes()
        if node["Alive"]
    )
    free = ray.available_resources()
    busy = [
        f"{amount * config.ep_size - free.get(name, 0.0):g} {name} that others use now, or an engine that is still open"
        for name, amount in bundle.items()
        if amount * config.ep_size > free.get(name, 0.0)
    ]
    missing = ", ".join(lacking(config, bundle) or busy) or f"nodes that fit the placement {config.placement}"
    why = "cannot be placed" if hopeless else f"were not placed within {config.placement_timeout_s:g} s"
    return (
        f"{config.ep_size} ranks with {asked} each ({config.placement}) {why}. The nodes offer {offers}. "
        f"Missing: {missing}. Use fewer ranks (--ep-size), fewer cores for each (--num-cpus-per-rank, below 1 shares "
        "a core), another placement (--placement), or more nodes."
    )
