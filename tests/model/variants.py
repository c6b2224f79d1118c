# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tiny checkpoints that the model's tests use, by name: a family and changes to its configuration."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, 5 experts": ("mixtral", {"num_local_experts": 5}),
    "mixtral, 2 experts": ("mixtral", {"num_local_experts": 2}),
    "mixtral, window": ("mixtral", {"sliding_window": 7}),
    "mixtral, no head_dim": ("mixtral", {"head_dim": None}),
    "mixtral, gelu": ("mixtral", {"hidden_act": "gelu", "intermediate_size": 48}),
    "mixtral, one kv head": ("mixtral", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3_moe", {}),
    "qwen3, 5 experts": ("qwen3_moe", {"num_experts": 5}),
    "qwen3, 2 experts": ("qwen3_moe", {"num_experts": 2}),
    "qwen3, top 1": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3, not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3, mixed layers": (
        "qwen3_moe",
        {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 5},
    ),
    "qwen3, all dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "qwen3, window off": ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen3, window, max_window_layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3, tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3_moe", {"attention_bias": True}),
    "qwen3, as wide inside": ("qwen3_moe", {"moe_intermediate_size": 48}),
    "qwen3, linear rope": ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "qwen3, llama3 rope": (
        "qwen3_moe",
        {"rope_parameters": LLAMA3_ROPE},
    ),
    "qwen3, yarn rope": ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    "mixtral, yarn rope, all switches": (
        "mixtral",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                **ROPE,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
# Families without experts. "llama" and "dense qwen3" are the plain ones; each other changes one switch.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, no head_dim": ("llama", {"head_dim": None}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no kv heads": ("llama", {"num_key_value_heads": None}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention biases": ("llama", {"attention_bias": True}),
    "llama, mlp biases": ("llama", {"mlp_bias": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, eps": ("llama", {"rms_norm_eps": 0.3}),
    "llama, theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama, yarn rope": ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    "dense qwen3": ("qwen3", {}),
    "dense qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "dense qwen3, attention biases": ("qwen3", {"attention_bias": True}),
    "dense qwen3, yarn rope": ("qwen3", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    "dense qwen3, window in all layers": ("qwen3", {**WINDOW, "max_window_layers": 0}),
    "dense qwen3, window in later layers": ("qwen3", {**WINDOW, "max_window_layers": 1}),
    "dense qwen3, window in listed layers": (
        "qwen3",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
