# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError
from metrale_ray.model import device
from metrale_ray.model.device import own_cores, resolve_device


def test_auto_is_the_cpu_without_a_gpu_and_the_gpu_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"sees 0 GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:x", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed are"):
        resolve_device(name)


@pytest.fixture
def pinnings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What was asked to be pinned: threads, and whose they are."""
    asked: list[tuple[int, str]] = []

    @contextmanager
    def pinned(num_threads: int, owner: str) -> Iterator[None]:
        asked.append((num_threads, owner))
        yield

    monkeypatch.setattr(device, "pinned", pinned)
    return asked


def test_a_rank_on_the_cpu_has_cores_of_its_own_for_each_of_its_threads(
    pinnings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, num_cpus in (("cpu", 3.5), ("auto", 1), ("cpu", None)):
        with own_cores(EngineConfig(model="m", device=name, num_cpus_per_rank=num_cpus), 2):
            pass
    assert pinnings == [(3, "rank 2"), (1, "rank 2"), (1, "rank 2")]


def test_a_rank_on_a_gpu_or_that_shares_a_core_or_is_not_to_be_pinned_floats(
    pinnings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="metrale_ray.model.device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for settings in (
        {"device": "cuda:1"},
        {"device": "auto"},
        {"device": "cpu", "pin": False},
        {"device": "cpu", "num_cpus_per_rank": 0.5},
    ):
        with own_cores(EngineConfig(model="m", **settings), 0):
            pass
    assert pinnings == []
    assert [each.message for each in caplog.records] == ["rank 0: threads: 1, not pinned: it has 0.5 of a core"]
