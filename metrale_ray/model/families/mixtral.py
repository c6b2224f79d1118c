# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mixtral: every layer has experts, whose weights always sum to 1; no biases, no norms on queries and keys.

Follows MixtralForCausalLM of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.decoder_reader import Traits, read_decoder
from metrale_ray.model.families.family import ExpertsApart, ExpertsFused, Family

DEFAULT_THETA = 1_000_000.0


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Mixtral config.json describes. Raises CheckpointError."""
    config = ConfigReader(values)
    moe = MoeConfig(
        num_experts=config.one_name("num_local_experts", "num_experts"),
        experts_per_token=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        normalize_weights=True,
        round_weights=False,
    )
    return read_decoder(
        config,
        Traits(
            architecture="MixtralForCausalLM",
            default_theta=DEFAULT_THETA,
            default_norm_eps=1e-5,
            sliding_window=config.count_or_none("sliding_window", None),
            attention_bias=False,
            qk_norm=False,
            moe=moe,
            sparse_layers=(True,) * config.num_layers(),
        ),
    )


FAMILY = Family(
    read_config,
    (
        ExpertsApart(
            router="block_sparse_moe.gate.weight",
            gate="block_sparse_moe.experts.{E}.w1.weight",
            up="block_sparse_moe.experts.{E}.w3.weight",
            down="block_sparse_moe.experts.{E}.w2.weight",
        ),
        ExpertsFused(
            router="mlp.gate.weight",
            gate_up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
        ),
    ),
)
