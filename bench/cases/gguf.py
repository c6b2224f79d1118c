# SPDX-License-Identifier: MIT OR Apache-2.0
"""The benchmarks' checkpoint as a GGUF file for llama.cpp: bf16 as it is, or Q8_0 by llama.cpp's own quantizer.

Format: the metadata and tensor names that llama.cpp's architecture "qwen3moe" reads. The vocabulary is a stub, as only
token ids are used. Reads the safetensors files with numpy alone, which knows no bf16: values stay raw 16 bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy

Q8_0_END = ".q8_0.gguf"
THREADS = os.cpu_count() or 1
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT_TENSORS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
OUTER_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
SPECIAL_TOKENS = (b"<unk>", b"<s>", b"</s>")


def ensure_gguf(model: Path, file: Path) -> None:
    """Write `file` from the checkpoint in `model`, unless it is there."""
    if file.exists():
        return
    partial = file.with_name(file.name + ".partial")
    if file.name.endswith(Q8_0_END):
        plain = file.with_name(file.name.removesuffix(Q8_0_END) + ".bf16.gguf")
        ensure_gguf(model, plain)
        _quantize(plain, partial)
    else:
        _write(model, partial)
    partial.rename(file)


def _quantize(plain: Path, file: Path) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.nthread = THREADS
    status = llama_cpp.llama_model_quantize(str(plain).encode(), str(file).encode(), params)
    if status != 0:
        raise RuntimeError(f"llama.cpp's quantizer gave {status} for {plain}")


def _write(model: Path, file: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tensors = dict(_tensors(model))
    writer = gguf.GGUFWriter(file, "qwen3moe")
    _add_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    for name, to in OUTER_TENSORS.items():
        _add(writer, to, tensors[name])
    for layer in range(config["num_hidden_layers"]):
        _add_layer(writer, layer, tensors, config.get("num_local_experts") or config["num_experts"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: Any, vocab_size: int) -> None:
    kinds = gguf.TokenType
    tokens = [*SPECIAL_TOKENS, *(b"<0x%02X>" % byte for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    missing = vocab_size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(b"\xe2\x96\x81t%d" % number for number in range(missing))])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([*types, *[kinds.NORMAL] * missing])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_layer(writer: Any, layer: int, tensors: dict[str, Any], num_experts: int) -> None:
    source, target = f"model.layers.{layer}.", f"blk.{layer}."
    for name, to in LAYER_TENSORS.items():
        values = tensors[f"{source}{name}.weight"]
        _add(writer, f"{target}{to}.weight", values, widen=name == "mlp.gate")
    for name, to in EXPERT_TENSORS.items():
        parts = [tensors[f"{source}mlp.experts.{expert}.{name}.weight"] for expert in range(num_experts)]
        _add(writer, f"{target}{to}.weight", numpy.stack(parts))


def _add(writer: Any, name: str, bits: Any, *, widen: bool = False) -> None:
    """Norms and routers are fp32 in llama.cpp, all else stays bf16."""
    if widen or bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
    else:
        raw = numpy.ascontiguousarray(bits).view(numpy.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor's raw 16-bit values, by name, mapped from the files."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
        data = numpy.memmap(path, dtype=numpy.uint8, mode="r", offset=8 + header_size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} in {path} is {entry['dtype']}; the benchmarks' checkpoint is BF16")
            first, last = entry["data_offsets"]
            yield name, data[first:last].view(numpy.uint16).reshape(entry["shape"])
