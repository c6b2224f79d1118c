# SPDX-License-Identifier: MIT OR Apache-2.0
"""How many cores each rank gets: the same number on all of them, as their threads decide the last bits of a sum.

Rules. Nobody's wish for a number is raised. Without one, ranks share what the nodes offer, as evenly as the placement
lets them; with fewer where others keep some for long. Ray keeps these cores for the ranks. How many threads they then
have follows from what processes may really use on the nodes where the ranks are.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import ray

from metrale_ray.cluster.unreserved import CPU, free_cpus
from metrale_ray.config import EngineConfig
from metrale_ray.cores import Usable

log = logging.getLogger(__name__)

GPU = "GPU"
Offer = Mapping[str, float]
"""What one node has, by Ray's names."""


def first_share(config: EngineConfig, nodes: Sequence[Offer]) -> int:
    """The cores of each rank to begin with. Where nodes that offer this do not hold all ranks, more like them may come:
    then as many as the least of these has for each."""
    share = largest_share(config, nodes)
    if share > 0:
        return share
    cores = min((node.get(CPU, 0.0) for node in nodes), default=1.0)
    return max(1, int(cores // math.ceil(config.ep_size / max(1, len(nodes)))))


def largest_share(config: EngineConfig, nodes: Sequence[Offer]) -> int:
    """The most whole cores that all ranks can have alike where nodes offer this; 0 where not all can have one."""
    most = int(max((node.get(CPU, 0.0) for node in nodes), default=0.0))
    return next((share for share in range(most, 0, -1) if _fits(config, nodes, share)), 0)


def _fits(config: EngineConfig, nodes: Sequence[Offer], num_cpus: int) -> bool:
    """Whether `nodes` can hold all ranks, with so many cores each, in the way that the placement asks for."""
    held = [_ranks_on(node, num_cpus, config.num_gpus_per_rank or 0.0) for node in nodes]
    if config.placement == "STRICT_PACK":
        return max(held, default=0) >= config.ep_size
    most_on_one = {"STRICT_SPREAD": 1, "SPREAD": math.ceil(config.ep_size / max(1, len(nodes)))}
    most = most_on_one.get(config.placement, config.ep_size)
    return sum(min(each, most) for each in held) >= config.ep_size


def _ranks_on(node: Offer, num_cpus: int, num_gpus: float) -> int:
    by_cpus = int(node.get(CPU, 0.0) // num_cpus)
    return min(by_cpus, int(node.get(GPU, 0.0) // num_gpus)) if num_gpus else by_cpus


def with_what_is_free(config: EngineConfig) -> EngineConfig | None:
    """The configuration with as many cores per rank as all can have now, beside what others use.

    None where that is no fewer than it has, and where there is no core for every rank.
    """
    offers = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    free = [{**offers[node_id], CPU: num_cpus} for node_id, num_cpus in free_cpus().items() if node_id in offers]
    share = largest_share(config, free)
    if share == 0 or share >= (config.num_cpus_per_rank or 1):
        return None
    return dataclasses.replace(config, num_cpus_per_rank=share)


def with_threads(
    config: EngineConfig,
    nodes: Sequence[str],
    usable: Mapping[str, Usable],
    *,
    by_choice: bool,
    most_threads: int | None = None,
) -> EngineConfig:
    """The configuration with as many cores per rank as each of them can have threads: the same number on all ranks.

    `nodes` is each rank's node, and `usable` what processes may use there, which can be less than Ray counts.
    `by_choice`: a person gave the number, so that hyperthreads of one core count as cores. `most_threads`: no rank may
    have more, None for no limit.
    """
    ranks_on = Counter(nodes)
    shares = {node: _share(usable[node], num_ranks, by_choice) for node, num_ranks in ranks_on.items()}
    node = min(shares, key=lambda each: shares[each])
    wanted = min(config.threads_per_rank, most_threads or config.threads_per_rank)
    if shares[node] < wanted:
        level = logging.WARNING if by_choice else logging.INFO
        here, num_ranks = usable[node], ranks_on[node]
        text = "each rank computes with %d threads, not %d: there is a node where %d may use %g CPUs of %d cores"
        log.log(level, text, shares[node], wanted, num_ranks, here.num_cpus, here.num_cores)
    threads = min(wanted, shares[node])
    return config if threads == config.threads_per_rank else dataclasses.replace(config, num_cpus_per_rank=threads)


def _share(usable: Usable, num_ranks: int, by_choice: bool) -> int:
    return max(1, int((usable.num_cpus if by_choice else usable.num_cores) // num_ranks))
