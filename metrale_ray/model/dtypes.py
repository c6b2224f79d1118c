# SPDX-License-Identifier: MIT OR Apache-2.0
"""The model's dtype: the one asked for, or the checkpoint's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.model.excerpt import excerpt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, checkpoint_config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of weights, cache and activations. `auto` takes config.json's, and float32 where it names none.

    Raises ConfigError for an unknown name, CheckpointError when config.json names a dtype that is not served.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype is {name!r}; allowed are auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    given = checkpoint_config.get("dtype") or checkpoint_config.get("torch_dtype") or "float32"
    if str(given).removeprefix("torch.") not in DTYPES:
        raise CheckpointError(
            f"config.json sets the dtype to {excerpt(given)}; set dtype to one of {', '.join(DTYPES)}"
        )
    return DTYPES[str(given).removeprefix("torch.")]
