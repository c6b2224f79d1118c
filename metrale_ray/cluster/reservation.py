# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Reservation`: what Ray keeps for one engine's ranks, as a placement group with one bundle for each."""

from __future__ import annotations

import logging
import time
import uuid

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from metrale_ray.cluster.placement import lacking, unplaceable
from metrale_ray.cluster.shares import GPU, with_what_is_free
from metrale_ray.cluster.unreserved import CPU
from metrale_ray.config import EngineConfig
from metrale_ray.errors import PlacementError

log = logging.getLogger(__name__)

POLL_S = 0.1
# So long a start waits for cores that others use, before it takes fewer where nobody asked for a number: longer than
# Ray takes to hear that tasks and engines have ended.
FEWER_CORES_S = 3.0


class Reservation:
    """Of the engine of that name; nothing is kept yet. `bundle`: what is kept for each rank, by Ray's names."""

    def __init__(self, name: str) -> None:
        self.bundle: dict[str, float] = {}
        self._name = name
        self._group: PlacementGroup | None = None

    @property
    def group(self) -> PlacementGroup:
        """Ray's group, after `make`."""
        assert self._group is not None, "make() comes first"
        return self._group

    def make(self, config: EngineConfig, *, can_grow: bool, may_take_fewer: bool) -> EngineConfig:
        """Wait for what `config` says of its ranks; it, with the cores that each of them got. Raises PlacementError.

        `can_grow`: nodes may still come. `may_take_fewer`: a rank may do with fewer cores, where others keep the rest.
        """
        now = time.monotonic()
        deadline, patient_until = now + config.placement_timeout_s, now + FEWER_CORES_S
        self._ask(config)
        while not self._is_made():
            hopeless = not can_grow and bool(lacking(config, self.bundle))
            now = time.monotonic()
            if hopeless or now >= deadline:
                raise PlacementError(unplaceable(config, self.bundle, hopeless))
            fewer = with_what_is_free(config) if may_take_fewer and now >= patient_until else None
            if fewer is not None:
                log.warning("cores of each rank: %s, not %s: others use the rest", *_cores(fewer, config))
                config, patient_until = fewer, now + FEWER_CORES_S
                self.remove()
                self._ask(config)
            time.sleep(POLL_S)
        return config

    def remove(self) -> None:
        """Give everything back. May be called again."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _ask(self, config: EngineConfig) -> None:
        self.bundle = {CPU: float(config.num_cpus_per_rank or 1)}
        if config.num_gpus_per_rank:
            self.bundle[GPU] = float(config.num_gpus_per_rank)
        unique_name = f"{self._name}/{uuid.uuid4().hex[:8]}"  # Ray refuses a second group of a name, whoever's it is
        bundles = [dict(self.bundle) for _ in range(config.ep_size)]
        self._group = placement_group(bundles, strategy=config.placement, name=unique_name)

    def _is_made(self) -> bool:
        return bool(placement_group_table(self.group).get("state") == "CREATED")


def _cores(*configs: EngineConfig) -> list[str]:
    return [f"{config.num_cpus_per_rank:g}" for config in configs]
