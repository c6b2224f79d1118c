# SPDX-License-Identifier: MIT OR Apache-2.0
"""The checkpoint that the benchmarks run: a random Qwen3-MoE of 1.3 billion parameters in bf16, 227 million active.

64 experts, 8 of them per token, 16 layers, hidden 1024. Written once into the cache folder by transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "intermediate_size": 3072,
    "vocab_size": 32_000,
}


def ensure_model(folder: Path | None = None) -> Path:
    """The checkpoint's folder; it is written when it is not there yet, which takes about a minute."""
    cache = Path(os.environ.get("METRALE_CACHE_DIR") or Path.home() / ".cache" / "metrale_ray")
    folder = folder or cache / "bench-qwen3-moe-1b-v1"
    if not (folder / "config.json").exists():
        print(f"writing {folder} (2.6 GB) ...", file=sys.stderr, flush=True)
        _write(folder)
    return folder


def ensure_tokenizer(folder: Path) -> Path:
    """The same folder, with a tokenizer of one word for each id."""
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        rust = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0"))
        rust.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="w2").save_pretrained(folder)
    return folder


def _write(folder: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        mlp_only_layers=[],
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    partial = folder.with_name(folder.name + ".partial")
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    print(ensure_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
