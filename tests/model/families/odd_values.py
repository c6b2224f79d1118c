# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a config.json may hold where it should not: odd JSON values, a strategy for more of them, and where they go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from metrale_ray.model.families import FAMILIES

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 5, 999, 10_001, 2**31 - 1, 2**31, 10**12, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "silu", "x", "MixtralForCausalLM", "line\nbreak", "\ud800", "x" * 10_000, "default"),
    *([], [0], [[]], ["x"], [["x"]], ["MixtralForCausalLM"], [None], [{}], [10**400], [0] * 10_000),
    *({}, {"x": 1}, {"rope_type": None}, {"rope_type": ["yarn"]}, {"rope_type": "yarn"}, {"type": 5}),
    json.loads("[" * 300 + "]" * 300),
)
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": None,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}
ROPE: dict[str, Any] = {
    "attention_factor": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 2.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "mscale": None,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10_000.0,
    "truncate": True,
    "type": "linear",
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {**EXPERTS, "sliding_window": None},
    "Qwen3ForCausalLM": WINDOW,
    "Qwen3MoeForCausalLM": {
        **EXPERTS,
        **WINDOW,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
Place = tuple[str, ...]


def valid_config(architecture: str, rope_type: str = "default") -> dict[str, Any]:
    """A config.json that is read, with every key that is known. A new mapping each time."""
    rope = {**ROPE, "rope_type": rope_type}
    return {**COMMON, **OF_FAMILY[architecture], "architectures": [architecture], "rope_scaling": rope}


def places(config: dict[str, Any]) -> Iterator[Place]:
    """All places for a value: the keys, and those inside the mapping of rope."""
    yield from ((key,) for key in config)
    yield from (("rope_scaling", key) for key in config["rope_scaling"])


def put(config: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """`config` with another value in one place."""
    if len(place) == 1:
        return {**config, place[0]: value}
    inner = config[place[0]]
    # An earlier change may have left no mapping there.
    return {**config, place[0]: {**inner, place[1]: value}} if isinstance(inner, dict) else config


def values() -> st.SearchStrategy[Any]:
    """Any JSON value, often one of the odd ones."""
    characters = st.characters(exclude_categories=())
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(characters, max_size=8)
    nested = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    )
    return st.sampled_from(ODD_VALUES) | nested


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of any family with up to three odd values in it."""
    config = valid_config(draw(st.sampled_from(sorted(FAMILIES))), draw(st.sampled_from(ROPE_TYPES)))
    for place in draw(st.lists(st.sampled_from(list(places(config))), min_size=1, max_size=3)):
        config = put(config, place, draw(values()))
    return config


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
