# SPDX-License-Identifier: MIT OR Apache-2.0
"""The model of the simulation: a real checkpoint as small as one can be, with a tokenizer, so that grammars work.

Two layers with experts, each with one sum over the ranks per step. The weights are random under a fixed seed and large
enough that attention, routing and positions decide the tokens. It is written without transformers, whose import takes
longer than a thousand steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
END = 0
NUM_LAYERS = 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT_SIZE = 16, 2, 1, 8, 4, 8
TEXTS = ["one two three four five", "the quick brown fox", "a stop, a start; an end"]
NUM_TEXT_TOKENS = 300

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 16,
    "moe_intermediate_size": EXPERT_SIZE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "torch_dtype": "float32",
}


def kv_block_bytes(block_size: int) -> int:
    """What one block of the KV cache takes on each rank: keys and values of all layers in float32."""
    return 2 * NUM_LAYERS * KV_HEADS * HEAD_DIM * 4 * block_size


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint and its tokenizer into `folder`, and give the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(_tensors(seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN, 2.0),
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN, 4.0),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
            prefix + "self_attn.q_norm.weight": norm(HEAD_DIM) * 2,
            prefix + "self_attn.k_norm.weight": norm(HEAD_DIM) * 2,
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2.0),
            prefix + "mlp.gate.weight": matrix(EXPERTS, HIDDEN, 2.0),
        }
        for expert in range(EXPERTS):
            inner = f"{prefix}mlp.experts.{expert}."
            tensors[inner + "gate_proj.weight"] = matrix(EXPERT_SIZE, HIDDEN, 2.0)
            tensors[inner + "up_proj.weight"] = matrix(EXPERT_SIZE, HIDDEN, 2.0)
            tensors[inner + "down_proj.weight"] = matrix(HIDDEN, EXPERT_SIZE, 2.0)
    return tensors


def _tokenizer() -> Tokenizer:
    """Byte-level, END first; all its ids are below VOCAB_SIZE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer
