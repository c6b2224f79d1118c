# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rotary settings from config.json, as transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them.

Rules, as in transformers: rope_scaling wins over rope_parameters; a theta inside that mapping wins over rope_theta; an
original_max_position_embeddings beside it wins over the one inside. Kinds that are not implemented are refused by name.
"""

from __future__ import annotations

import math

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import RopeConfig
from metrale_ray.model.excerpt import excerpt
from metrale_ray.model.families.config_reader import ConfigReader

SUPPORTED = ("default", "linear", "llama3", "yarn")


def read_rope(config: ConfigReader, default_theta: float) -> RopeConfig:
    """The rotary settings of a whole model. Raises CheckpointError for a kind or a switch that is not implemented."""
    values = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"{config.where} sets the rope parameters to {excerpt(values)}; they must be a mapping")
    rope = ConfigReader(values, f"{config.where} (rope parameters)")
    kind = next((values[key] for key in ("rope_type", "type") if rope.has(key)), "default")
    for reader in (config, rope):
        if reader.positive("partial_rotary_factor", 1.0) != 1.0:
            reader.refuse("partial_rotary_factor", "these families rotate the whole head")
    theta = rope.positive("rope_theta", config.positive("rope_theta", default_theta))
    match kind:
        case "default":
            return RopeConfig("default", theta)
        case "linear":
            return RopeConfig("linear", theta, factor=rope.positive("factor"))
        case "llama3":
            return _read_llama3(config, rope, theta)
        case "yarn":
            return _read_yarn(config, rope, theta)
        case _:
            raise CheckpointError(
                f"{rope.where}: rope type {excerpt(kind)} is not supported; known are {', '.join(SUPPORTED)}"
            )


def _read_llama3(config: ConfigReader, rope: ConfigReader, theta: float) -> RopeConfig:
    return RopeConfig(
        "llama3",
        theta,
        factor=rope.positive("factor"),
        original_max_positions=_original_max_positions(config, rope),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
    )


def _read_yarn(config: ConfigReader, rope: ConfigReader, theta: float) -> RopeConfig:
    if theta == 1.0:
        raise CheckpointError(f"{config.where}: rope_theta is 1, and yarn divides by its logarithm; it must be another")
    original = _original_max_positions(config, rope)
    factor = rope.positive("factor", config.count("max_position_embeddings") / original)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _original_max_positions(config: ConfigReader, rope: ConfigReader) -> int:
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.count(key)
    return rope.count(key, config.count("max_position_embeddings"))


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """What cos and sin are multiplied by (YaRN, arXiv 2309.00071, and DeepSeek's mscale)."""
    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    mscale, mscale_all_dim = rope.values.get("mscale"), rope.values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, rope.positive("mscale")) / _mscale(factor, rope.positive("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
