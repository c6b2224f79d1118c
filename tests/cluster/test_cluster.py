# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cluster that has no ranks, as before its start and after its end. Ray itself is stood in for."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import ray

from metrale_ray.cluster import cluster as module
from metrale_ray.cluster.cluster import RAY_GONE, Cluster
from metrale_ray.config import EngineConfig


@pytest.mark.parametrize("is_closed", [False, True])
def test_without_ranks_the_wait_for_an_end_takes_its_time(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray", SimpleNamespace(is_initialized=lambda: True))
    cluster = Cluster(EngineConfig(model="m"))
    if is_closed:
        cluster.close()
    began_s = time.monotonic()
    assert cluster.wait_ended(0.05) is None
    assert time.monotonic() - began_s >= 0.05


def test_without_ray_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray", SimpleNamespace(is_initialized=lambda: False))
    death = Cluster(EngineConfig(model="m")).wait_ended(3600)
    assert death is not None
    assert death.message == RAY_GONE


def test_it_can_be_closed_after_its_ray_was_shut_down_and_another_one_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kill(actor: str, no_restart: bool) -> None:
        asked.append(actor)
        raise ray.exceptions.ActorHandleNotFoundError("handles are not valid across Ray sessions")

    played = SimpleNamespace(is_initialized=lambda: True, kill=kill, exceptions=ray.exceptions)
    monkeypatch.setattr(module, "ray", played)
    cluster = Cluster(EngineConfig(model="m"))
    cluster._actors = ["rank 0", "rank 1"]
    cluster.close()
    assert sorted(asked) == ["rank 0", "rank 1"]
