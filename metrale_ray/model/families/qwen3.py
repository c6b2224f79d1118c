# SPDX-License-Identifier: MIT OR Apache-2.0
"""Qwen3: every layer is dense; queries and keys are normalised per head.

Follows Qwen3ForCausalLM of transformers: a window counts only with use_sliding_window, and then in the layers that
layer_types names, or without that list in those from number max_window_layers on, counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.excerpt import excerpt
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.decoder_reader import Traits, read_decoder
from metrale_ray.model.families.family import Family

DEFAULT_THETA = 10_000.0
DEFAULT_HEAD_DIM = 128
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
FULL, WINDOWED = "full_attention", "sliding_attention"


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Qwen3 config.json describes. Raises CheckpointError."""
    config = ConfigReader(values)
    has_window = config.flag("use_sliding_window", False)
    window = config.count_or_none("sliding_window", DEFAULT_WINDOW) if has_window else None
    return read_decoder(
        config,
        Traits(
            architecture="Qwen3ForCausalLM",
            default_theta=DEFAULT_THETA,
            default_norm_eps=1e-6,
            default_head_dim=DEFAULT_HEAD_DIM,
            sliding_window=window,
            windowed_layers=_windowed_layers(config, window),
            attention_bias=config.flag("attention_bias", False),
            qk_norm=True,
            moe=None,
            sparse_layers=(False,) * config.num_layers(),
        ),
    )


def _windowed_layers(config: ConfigReader, window: int | None) -> tuple[bool, ...]:
    num_layers = config.num_layers()
    if config.has("layer_types"):
        return _listed_layers(config, num_layers, window)
    first = config.count("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, at_least=0)
    return tuple(window is not None and layer >= first for layer in range(num_layers))


def _listed_layers(config: ConfigReader, num_layers: int, window: int | None) -> tuple[bool, ...]:
    kinds = config.values["layer_types"]
    allowed = (FULL,) if window is None else (FULL, WINDOWED)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in allowed for kind in kinds):
        needed = " (sliding_attention needs use_sliding_window and sliding_window)" if window is None else ""
        raise CheckpointError(
            f"{config.where} sets layer_types to {excerpt(kinds)}; it must be a list with one of {', '.join(allowed)} "
            f"for each of the {num_layers} layers{needed}"
        )
    return tuple(kind == WINDOWED for kind in kinds)


FAMILY = Family(read_config)
