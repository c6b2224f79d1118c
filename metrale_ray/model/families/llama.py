# SPDX-License-Identifier: MIT OR Apache-2.0
"""Llama: every layer is dense and attends to everything before; biases where the configuration asks for them.

Follows LlamaForCausalLM of transformers, which knows no window: a configuration with one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.decoder_reader import Traits, read_decoder
from metrale_ray.model.families.family import Family

DEFAULT_THETA = 10_000.0


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Llama config.json describes. Raises CheckpointError."""
    config = ConfigReader(values)
    config.refuse("sliding_window", "every layer of this model attends to everything before")
    return read_decoder(
        config,
        Traits(
            architecture="LlamaForCausalLM",
            default_theta=DEFAULT_THETA,
            default_norm_eps=1e-6,
            sliding_window=None,
            attention_bias=config.flag("attention_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
            qk_norm=False,
            moe=None,
            sparse_layers=(False,) * config.num_layers(),
        ),
    )


FAMILY = Family(read_config)
