# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading config.json, in the spellings of transformers 4 and 5, and refusing what is not honoured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.families import FAMILIES, family_of
from tests.fixtures.tiny import CLASSES, FAMILY_SIZES, SIZES

MIXTRAL: dict[str, Any] = {  # as transformers 4 wrote it
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
}
QWEN3: dict[str, Any] = {
    **{key: value for key, value in MIXTRAL.items() if key != "num_local_experts"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "max_window_layers": 2,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "rope_scaling": None,
    "use_sliding_window": False,
}


def read(config: dict[str, Any], **changes: Any) -> DecoderConfig:
    values = {**config, **changes}
    return family_of(values).read_config(values)


def test_the_spelling_of_transformers_4_is_read() -> None:
    config = read(QWEN3)
    assert (config.head_dim, config.sliding_window, config.rope.theta) == (32, None, 1e6)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.intermediate_size, config.moe.normalize_weights) == (8, 24, True)


@pytest.mark.parametrize("family", CLASSES)
def test_the_spelling_of_transformers_5_is_read(family: str, tmp_path: Path) -> None:
    config_class, model_class = CLASSES[family]
    written = config_class(**{**SIZES, **FAMILY_SIZES[family]}, architectures=[model_class.__name__])
    written.save_pretrained(tmp_path)
    config = family_of(values := json.loads((tmp_path / "config.json").read_text())).read_config(values)
    assert (config.hidden_size, config.num_layers, config.head_dim) == (48, 3, 16)
    assert config.rope.theta == written.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == written.rms_norm_eps


def test_both_spellings_of_one_model_read_alike() -> None:
    new = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "num_experts")}
    new |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "num_local_experts": 8}
    assert read(new) == read(QWEN3)


def test_the_defaults_of_each_family_are_those_of_the_reference() -> None:
    bare = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rms_norm_eps", "norm_topk_prob")}
    assert read(bare).rope.theta == 10_000.0
    assert read(bare).rms_norm_eps == 1e-6
    assert not read(bare).moe.normalize_weights
    assert read({**MIXTRAL, "rope_theta": None, "rms_norm_eps": None}).rope.theta == 1e6
    assert read(MIXTRAL).head_dim == 16


def test_layers_are_dense_where_the_switches_say_so() -> None:
    config = read(QWEN3, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.sparse_layers == (False, True, False, False, False, True)
    assert config.num_sparse_layers == 2
    assert read(QWEN3, mlp_only_layers=[0, 1]).moe is None


def test_a_window_counts_only_when_it_is_switched_on() -> None:
    assert read(QWEN3, sliding_window=5).sliding_window is None
    assert read(QWEN3, sliding_window=5, use_sliding_window=True).sliding_window == 5
    assert read(MIXTRAL, sliding_window=5).sliding_window == 5


def test_rope_scaling_wins_over_rope_parameters_and_theta_inside_over_theta_outside() -> None:
    scaling = {"type": "linear", "factor": 2.0, "rope_theta": 7.0}
    rope = read(QWEN3, rope_scaling=scaling, rope_parameters={"rope_type": "default"}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 7.0)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(CheckpointError, match="GemmaForCausalLM") as caught:
        family_of({"architectures": ["GemmaForCausalLM"]})
    assert all(name in caught.value.message for name in FAMILIES)
    for nothing in ({}, {"architectures": None}, {"architectures": []}):
        with pytest.raises(CheckpointError, match="none"):
            family_of(nothing)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "rope parameters"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_experts_per_tok": 9}, "9"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 15}, "15"),
        ({"num_experts": 8, "num_local_experts": 4}, "contradicts itself"),
        ({"num_experts": None}, "num_experts"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(QWEN3, **changes)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"has no {key}"):
        read({name: value for name, value in QWEN3.items() if name != key})


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(QWEN3).hidden_size = 1  # type: ignore[misc]
