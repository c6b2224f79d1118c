# SPDX-License-Identifier: MIT OR Apache-2.0
"""Qwen3-MoE: some layers may be dense; queries and keys are normalised per head.

Follows Qwen3MoeForCausalLM of transformers: a layer is sparse unless mlp_only_layers lists it or its number, counted
from 1, is no multiple of decoder_sparse_step; sliding_window counts for all layers and only with use_sliding_window,
whatever max_window_layers says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.decoder_reader import Traits, read_decoder
from metrale_ray.model.families.family import ExpertsApart, ExpertsFused, Family

DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 4096


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Qwen3-MoE config.json describes. Raises CheckpointError."""
    config = ConfigReader(values)
    windowed = config.flag("use_sliding_window", False)
    sparse_layers = _sparse_layers(config)
    return read_decoder(
        config,
        Traits(
            architecture="Qwen3MoeForCausalLM",
            default_theta=DEFAULT_THETA,
            default_norm_eps=1e-6,
            sliding_window=config.count_or_none("sliding_window", DEFAULT_WINDOW) if windowed else None,
            attention_bias=config.flag("attention_bias", False),
            qk_norm=True,
            moe=_read_moe(config) if any(sparse_layers) else None,
            sparse_layers=sparse_layers,
        ),
    )


def _sparse_layers(config: ConfigReader) -> tuple[bool, ...]:
    dense = frozenset(config.counts("mlp_only_layers"))
    step = config.count("decoder_sparse_step", 1)
    has_experts = config.one_name("num_experts", "num_local_experts") > 0
    layers = range(config.num_layers())
    return tuple(has_experts and layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _read_moe(config: ConfigReader) -> MoeConfig:
    return MoeConfig(
        num_experts=config.one_name("num_experts", "num_local_experts"),
        experts_per_token=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size"),
        normalize_weights=config.flag("norm_topk_prob", False),
        round_weights=True,
    )


FAMILY = Family(
    read_config,
    (
        ExpertsApart(
            router="mlp.gate.weight",
            gate="mlp.experts.{E}.gate_proj.weight",
            up="mlp.experts.{E}.up_proj.weight",
            down="mlp.experts.{E}.down_proj.weight",
        ),
        ExpertsFused(
            router="mlp.gate.weight",
            gate_up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
        ),
    ),
)
