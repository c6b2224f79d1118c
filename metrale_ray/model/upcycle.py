# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dense Llama model in a GGUF file, upcycled to a mixture of experts in Mixtral's format.

Every expert is the dense feed-forward with its neurons in another order: the same function from different tensors.
A token's experts are weighted to a sum of 1, so any choice of experts gives the dense model's result, up to the last
bits, and a small random router will do. The result is an upcycled model, no pretrained mixture; it shows what serving
one takes and that the answer is right, and it cannot show that a token went to the right expert.

Leaves out: experts that differ (Komatsuzaki et al., "Sparse Upcycling", 2022, trains them further), other formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metrale_ray.errors import CheckpointError

ROUTER_SCALE = 0.02  # as freshly initialised routers have
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
EXPERT_NAMES = {"ffn_gate.weight": "w1", "ffn_down.weight": "w2", "ffn_up.weight": "w3"}


@dataclass(frozen=True, slots=True)
class Upcycling:
    """What to make: `num_experts` per layer, `top_k` of them per token, orders and routers drawn from `seed`."""

    num_experts: int = 4
    top_k: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16


def upcycle(
    gguf_file: Path, folder: Path, plan: Upcycling = Upcycling(), on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Write config.json, generation_config.json and model.safetensors of the upcycled model into `folder`.

    `on_progress(done, total)` counts the GGUF file's tensors. Raises CheckpointError when the file is not a Llama
    model that this can read, OSError when `folder` cannot be written.
    """
    from safetensors.torch import save_file

    reader = _open(gguf_file)
    config = _config(gguf_file, reader, plan)
    tensors: dict[str, torch.Tensor] = {}
    for done, dense in enumerate(reader.tensors, start=1):
        tensors |= _upcycled(gguf_file, dense, config, plan)
        if on_progress is not None:
            on_progress(done, len(reader.tensors))
    tensors |= _routers(config, plan)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ends)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The library makes the file readable for its owner only; whoever may read the rest may read this.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _open(gguf_file: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(gguf_file)
    except OSError as error:
        raise CheckpointError(f"cannot read {gguf_file}: {error.strerror}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{gguf_file} is not a whole GGUF file: {error}") from error


def _config(gguf_file: Path, reader: Any, plan: Upcycling) -> dict[str, Any]:
    """config.json, from the GGUF file's metadata."""

    def value(key: str) -> Any:
        field = reader.fields.get(key)
        if field is None:
            raise CheckpointError(f"{gguf_file} has no {key}, which a Llama model has")
        return field.contents()

    if value("general.architecture") != "llama":
        raise CheckpointError(f"{gguf_file} holds a {value('general.architecture')} model; only llama can be upcycled")
    heads, hidden_size = value("llama.attention.head_count"), value("llama.embedding_length")
    names = {tensor.name: tensor for tensor in reader.tensors}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_local_experts": plan.num_experts,
        "num_experts_per_tok": plan.top_k,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": str(plan.dtype).removeprefix("torch."),
    }


def _upcycled(gguf_file: Path, dense: Any, config: dict[str, Any], plan: Upcycling) -> dict[str, torch.Tensor]:
    """The tensors that one tensor of the dense model becomes."""
    import gguf

    weight = torch.tensor(gguf.dequantize(dense.data, dense.tensor_type), dtype=plan.dtype)
    if dense.name in MODEL_NAMES:
        return {MODEL_NAMES[dense.name]: weight}
    block, _, name = dense.name.removeprefix("blk.").partition(".")
    prefix = f"model.layers.{block}."
    if name in EXPERT_NAMES:
        orders = _orders(int(block), config["intermediate_size"], plan)
        dimension = 1 if name == "ffn_down.weight" else 0
        expert = prefix + "block_sparse_moe.experts.{}." + EXPERT_NAMES[name] + ".weight"
        return {expert.format(e): weight.index_select(dimension, order) for e, order in enumerate(orders)}
    if name not in LAYER_NAMES:
        raise CheckpointError(f"{gguf_file}: tensor {dense.name} is none of a Llama model's")
    if name == "attn_q.weight":
        weight = _halves(weight, config["num_attention_heads"])
    if name == "attn_k.weight":
        weight = _halves(weight, config["num_key_value_heads"])
    return {prefix + LAYER_NAMES[name]: weight}


def _orders(layer: int, num_neurons: int, plan: Upcycling) -> Iterator[torch.Tensor]:
    """Each expert's order of the layer's neurons; the same one whenever it is asked for."""
    generator = torch.Generator().manual_seed(plan.seed + layer)
    return (torch.randperm(num_neurons, generator=generator) for _ in range(plan.num_experts))


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from GGUF's order for rotary pairs (0, 1), (2, 3), .. to that for (0, n/2), (1, n/2 + 1), .."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _routers(config: dict[str, Any], plan: Upcycling) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(plan.seed)
    shape = (plan.num_experts, config["hidden_size"])
    return {
        f"model.layers.{layer}.block_sparse_moe.gate.weight": (
            torch.randn(shape, generator=generator) * ROUTER_SCALE
        ).to(plan.dtype)
        for layer in range(config["num_hidden_layers"])
    }


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
