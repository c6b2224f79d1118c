# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
import torch

from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.model.dtypes import resolve_dtype


def test_auto_takes_the_checkpoints_dtype_in_either_spelling() -> None:
    assert resolve_dtype("auto", {"dtype": "bfloat16"}) == torch.bfloat16
    assert resolve_dtype("auto", {"torch_dtype": "float16"}) == torch.float16
    assert resolve_dtype("auto", {"torch_dtype": "torch.float32"}) == torch.float32
    assert resolve_dtype("auto", {}) == torch.float32


def test_a_named_dtype_wins_over_the_checkpoints() -> None:
    assert resolve_dtype("float32", {"dtype": "bfloat16"}) == torch.float32


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", {})
    with pytest.raises(CheckpointError, match="float64"):
        resolve_dtype("auto", {"dtype": "float64"})
