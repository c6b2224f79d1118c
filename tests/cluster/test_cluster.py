# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cluster that has no ranks, as before its start and after its end. Ray itself is stood in for."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

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


def test_what_it_had_on_a_ray_that_was_left_is_not_looked_for_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray", SimpleNamespace(is_initialized=lambda: True))  # and nothing that could be asked
    monkeypatch.setattr(module.RaySession, "is_lost", True)
    cluster = Cluster(EngineConfig(model="m"))
    cluster._actors, cluster._runs, cluster._is_ready = ["rank 0"], ["its run"], True
    cluster.close()
    assert cluster._actors == []
