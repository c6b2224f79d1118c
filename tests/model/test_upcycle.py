# SPDX-License-Identifier: MIT OR Apache-2.0
"""Upcycling a small dense Llama model that is written as GGUF here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from metrale_ray.errors import CheckpointError
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.upcycle import Upcycling, upcycle

FP32 = Upcycling(num_experts=4, top_k=2, seed=3, dtype=torch.float32)


def dense_model(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gguf_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head as GGUF has them, one row at a time."""
    head_rows = weight.shape[0] // num_heads
    half = head_rows // 2
    rows = [h * head_rows + pair + side * half for h in range(num_heads) for pair in range(half) for side in range(2)]
    return weight[rows]


def write_gguf(file: Path, model: LlamaForCausalLM, architecture: str = "llama", **more: torch.Tensor) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        **more,
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        for path, name in names.items():
            weight = layer.get_parameter(path + ".weight")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
            tensors[f"blk.{index}.{name}.weight"] = weight if heads is None else gguf_order(weight, heads)
    for name, weight in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(weight.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
def test_the_upcycled_model_gives_the_dense_models_logits(tmp_path: Path, folder: Path, tied: bool) -> None:
    torch.set_num_threads(1)
    dense = dense_model(tied=tied)
    upcycle(write_gguf(tmp_path / "a.gguf", dense), folder, FP32)
    upcycled = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = dense(ids).logits, upcycled(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_the_experts_of_a_layer_and_the_layers_have_different_tensors(tmp_path: Path, folder: Path) -> None:
    upcycle(write_gguf(tmp_path / "a.gguf", dense_model()), folder, FP32)
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        weights = layer.mlp.experts.gate_up_proj
        assert all(not torch.equal(weights[a], weights[b]) for a in range(4) for b in range(a))
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    assert not torch.equal(gates[0], gates[1])


def test_the_checkpoint_is_whole_and_says_where_a_text_ends(tmp_path: Path, folder: Path) -> None:
    done: list[tuple[int, int]] = []
    upcycle(write_gguf(tmp_path / "a.gguf", dense_model()), folder, on_progress=lambda *step: done.append(step))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config["num_local_experts"] == 4
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["rope_theta"] == 5000.0
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {record.dtype for record in checkpoint.tensors.values()} == {"BF16"}
    assert len(checkpoint.tensors) == 2 + 3 * (6 + 3 * 4 + 1)
    assert done == [(step, 29) for step in range(1, 30)]
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_the_same_seed_gives_the_same_checkpoint_and_another_seed_another_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", dense_model())
    contents = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        (tmp_path / name).mkdir()
        upcycle(file, tmp_path / name, Upcycling(seed=seed))
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "abc"]
    assert configs[0] == configs[1] == configs[2]


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        upcycle(file, folder)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_no_whole_llama_model_is_refused(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "a.gguf"
    assert "No such file" in refusal(file, folder)
    for content in (b"", b"nonsense, and long enough to hold a header"):
        file.write_bytes(content)
        assert "is not a whole GGUF file" in refusal(file, folder)
    whole = write_gguf(file, dense_model()).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "is not a whole GGUF file" in refusal(file, folder)


def test_another_architecture_and_an_unknown_tensor_are_refused_by_name(tmp_path: Path, folder: Path) -> None:
    file: Any = tmp_path / "a.gguf"
    assert "holds a gemma model" in refusal(write_gguf(file, dense_model(), "gemma"), folder)
    more = {"blk.0.attn_q.bias": torch.zeros(32)}
    assert "tensor blk.0.attn_q.bias is none of" in refusal(write_gguf(file, dense_model(), **more), folder)
