# SPDX-License-Identifier: MIT OR Apache-2.0
"""What Ray keeps for an engine's ranks, by a Ray that makes a group once it asks for little enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from metrale_ray.cluster import reservation
from metrale_ray.cluster.reservation import Reservation
from metrale_ray.config import EngineConfig
from metrale_ray.errors import PlacementError


class PlayedRay:
    """Has `room` CPUs for each bundle. `groups`: each group's bundles, while it is there."""

    def __init__(self, room: float) -> None:
        self.room = room
        self.groups: dict[str, list[dict[str, float]]] = {}
        self.asked: list[tuple[float, str]] = []

    def make(self, bundles: list[dict[str, float]], strategy: str, name: str) -> str:
        self.groups[name] = bundles
        self.asked.append((bundles[0]["CPU"], strategy))
        return name

    def table(self, name: str) -> dict[str, str]:
        fits = all(bundle["CPU"] <= self.room for bundle in self.groups[name])
        return {"state": "CREATED" if fits else "PENDING"}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay(8)
    monkeypatch.setattr(reservation, "placement_group", played.make)
    monkeypatch.setattr(reservation, "placement_group_table", played.table)
    monkeypatch.setattr(reservation, "remove_placement_group", lambda name: played.groups.pop(name))
    monkeypatch.setattr(reservation, "with_what_is_free", lambda config: fewer(config, played.room))
    monkeypatch.setattr(reservation, "lacking", lambda config, bundle: ["1 CPU"] if bundle["CPU"] > 100 else [])
    monkeypatch.setattr(reservation, "unplaceable", lambda config, bundle, hopeless: f"{bundle} {hopeless}")
    for name in ("POLL_S", "FEWER_CORES_S"):
        monkeypatch.setattr(reservation, name, 0.0)
    return played


def fewer(config: EngineConfig, room: float) -> EngineConfig | None:
    return dataclasses.replace(config, num_cpus_per_rank=room) if 0 < room < (config.num_cpus_per_rank or 1) else None


def config(num_cpus: float, **settings: Any) -> EngineConfig:
    return EngineConfig(model="m", ep_size=2, num_cpus_per_rank=num_cpus, placement="SPREAD", **settings)


def test_each_rank_has_a_bundle_of_what_was_asked_for(ray: PlayedRay) -> None:
    made = Reservation("mine")
    asked = config(8, num_gpus_per_rank=0.5)
    assert made.make(asked, can_grow=False, may_take_fewer=True) == asked
    assert made.bundle == {"CPU": 8.0, "GPU": 0.5}
    assert ray.groups == {made.group: [made.bundle, made.bundle]}
    assert str(made.group).startswith("mine/")
    made.remove()
    made.remove()
    assert ray.groups == {}


def test_fewer_cores_are_taken_where_others_keep_the_rest_and_it_is_said(
    ray: PlayedRay, caplog: pytest.LogCaptureFixture
) -> None:
    ray.room = 5
    made = Reservation("mine")
    assert made.make(config(8), can_grow=False, may_take_fewer=True).num_cpus_per_rank == 5
    assert ray.asked == [(8.0, "SPREAD"), (5.0, "SPREAD")]
    assert list(ray.groups) == [made.group]
    assert caplog.messages == ["cores of each rank: 5, not 8: others use the rest"]


def test_a_number_that_was_asked_for_is_waited_for(ray: PlayedRay) -> None:
    ray.room = 5
    made = Reservation("mine")
    with pytest.raises(PlacementError, match="False"):
        made.make(config(8, placement_timeout_s=0.01), can_grow=False, may_take_fewer=False)
    assert ray.asked == [(8.0, "SPREAD")]
    made.remove()
    assert ray.groups == {}


def test_where_nothing_is_free_the_start_fails_in_time(ray: PlayedRay) -> None:
    ray.room = 0
    with pytest.raises(PlacementError, match="False"):
        Reservation("mine").make(config(8, placement_timeout_s=0.01), can_grow=True, may_take_fewer=True)


def test_what_nodes_can_never_have_is_not_waited_for_where_none_can_come(ray: PlayedRay) -> None:
    with pytest.raises(PlacementError, match="True"):
        Reservation("mine").make(config(200, placement_timeout_s=60), can_grow=False, may_take_fewer=False)
