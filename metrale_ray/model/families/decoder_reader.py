# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys of config.json that the decoder families share, read into a `DecoderConfig` and checked as a whole."""

from __future__ import annotations

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.rope_reader import read_rope


def read_decoder(
    config: ConfigReader,
    *,
    architecture: str,
    default_theta: float,
    default_norm_eps: float,
    sliding_window: int | None,
    windowed_layers: tuple[bool, ...] | None = None,
    default_head_dim: int | None = None,
    attention_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool,
    moe: MoeConfig | None,
    sparse_layers: tuple[bool, ...],
) -> DecoderConfig:
    """The shared keys, with what the family has read itself. Raises CheckpointError.

    `windowed_layers` is None where the window counts for all layers or for none, and `default_head_dim` where the
    heads share out the hidden size.
    """
    config.refuse("quantization_config", "only bfloat16, float16 and float32 weights are")
    if windowed_layers is None:
        _check_layer_types(config, sliding_window)
        windowed_layers = (sliding_window is not None,) * len(sparse_layers)
    num_heads = config.count("num_attention_heads")
    hidden_size = config.count("hidden_size")
    decoder = DecoderConfig(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", num_heads),
        head_dim=config.count("head_dim", default_head_dim or hidden_size // num_heads),
        intermediate_size=config.count("intermediate_size"),
        rms_norm_eps=config.positive("rms_norm_eps", default_norm_eps),
        activation=config.activation(),
        max_positions=config.count("max_position_embeddings"),
        rope=read_rope(config, default_theta),
        sliding_window=sliding_window if any(windowed_layers) else None,
        windowed_layers=windowed_layers,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        moe=moe,
        sparse_layers=sparse_layers,
    )
    _check(config, decoder)
    return decoder


def _check_layer_types(config: ConfigReader, sliding_window: int | None) -> None:
    """Families without `windowed_layers` treat all layers alike; a list that says otherwise is refused."""
    uniform = "full_attention" if sliding_window is None else "sliding_attention"
    if any(kind != uniform for kind in config.values.get("layer_types") or ()):
        config.refuse("layer_types", f"every layer of this model has {uniform}")


def _check(config: ConfigReader, decoder: DecoderConfig) -> None:
    if decoder.num_heads % decoder.num_kv_heads:
        raise CheckpointError(
            f"{config.where}: {decoder.num_heads} attention heads cannot be shared out over "
            f"{decoder.num_kv_heads} key-value heads"
        )
    if decoder.head_dim % 2:
        raise CheckpointError(f"{config.where}: head_dim is {decoder.head_dim}; rotation needs an even number")
    moe = decoder.moe
    if moe is not None and not 1 <= moe.experts_per_token <= moe.num_experts:
        raise CheckpointError(
            f"{config.where}: num_experts_per_tok is {moe.experts_per_token}, and there are {moe.num_experts} experts"
        )
