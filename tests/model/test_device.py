# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
import torch

from metrale_ray.errors import ConfigError
from metrale_ray.model.device import resolve_device


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
