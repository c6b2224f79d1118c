# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys of config.json that the decoder families share, read into a `DecoderConfig` and checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.rope_reader import read_rope

# Each expert of each layer has tensors of its own, which are planned by name before any is read. The largest models
# known have a tenth of this.
MAX_EXPERTS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a family knows of itself or has read itself.

    `windowed_layers` is None where the window counts for all layers or for none, and `default_head_dim` where the
    heads share out the hidden size.
    """

    architecture: str
    default_theta: float
    default_norm_eps: float
    sliding_window: int | None
    windowed_layers: tuple[bool, ...] | None = None
    default_head_dim: int | None = None
    attention_bias: bool
    mlp_bias: bool = False
    qk_norm: bool
    moe: MoeConfig | None
    sparse_layers: tuple[bool, ...]


def read_decoder(config: ConfigReader, traits: Traits) -> DecoderConfig:
    """The shared keys, with what the family has read itself. Raises CheckpointError."""
    config.refuse("quantization_config", "only bfloat16, float16 and float32 weights are")
    windowed_layers = _windowed_layers(config, traits)
    num_heads = config.count("num_attention_heads")
    hidden_size = config.count("hidden_size")
    decoder = DecoderConfig(
        architecture=traits.architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", num_heads),
        head_dim=config.count("head_dim", traits.default_head_dim or hidden_size // num_heads),
        intermediate_size=config.count("intermediate_size"),
        rms_norm_eps=config.positive("rms_norm_eps", traits.default_norm_eps),
        activation=config.activation(),
        max_positions=config.count("max_position_embeddings"),
        rope=read_rope(config, traits.default_theta),
        sliding_window=traits.sliding_window if any(windowed_layers) else None,
        windowed_layers=windowed_layers,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=traits.attention_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        moe=traits.moe,
        sparse_layers=traits.sparse_layers,
    )
    _check(config, decoder)
    return decoder


def _windowed_layers(config: ConfigReader, traits: Traits) -> tuple[bool, ...]:
    """Families that do not say treat all layers alike; a list in config.json that says otherwise is refused."""
    if traits.windowed_layers is not None:
        return traits.windowed_layers
    has_window = traits.sliding_window is not None
    uniform = "sliding_attention" if has_window else "full_attention"
    if any(kind != uniform for kind in config.texts("layer_types")):
        config.refuse("layer_types", f"every layer of this model has {uniform}")
    return (has_window,) * len(traits.sparse_layers)


def _check(config: ConfigReader, decoder: DecoderConfig) -> None:
    if decoder.num_heads % decoder.num_kv_heads:
        raise CheckpointError(
            f"{config.where}: {decoder.num_heads} attention heads cannot be shared out over "
            f"{decoder.num_kv_heads} key-value heads"
        )
    if decoder.head_dim % 2:
        raise CheckpointError(f"{config.where}: head_dim is {decoder.head_dim}; rotation needs an even number")
    if decoder.moe is not None:
        _check_experts(config, decoder.moe, decoder.num_sparse_layers)


def _check_experts(config: ConfigReader, moe: MoeConfig, num_sparse_layers: int) -> None:
    if not 1 <= moe.experts_per_token <= moe.num_experts:
        raise CheckpointError(
            f"{config.where}: num_experts_per_tok is {moe.experts_per_token}, and there are {moe.num_experts} experts"
        )
    if moe.num_experts * num_sparse_layers > MAX_EXPERTS:
        raise CheckpointError(
            f"{config.where}: {moe.num_experts} experts in each of {num_sparse_layers} layers are more than "
            f"{MAX_EXPERTS} in all, which is the most that is planned for"
        )
