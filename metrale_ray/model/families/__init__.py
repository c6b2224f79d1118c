# SPDX-License-Identifier: MIT OR Apache-2.0
"""The table of architectures. A family's file states only what it does differently from the shared decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.excerpt import excerpt
from metrale_ray.model.families import llama, mixtral, qwen3, qwen3_moe
from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.family import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}
MAX_NAMED = 3  # of the architectures that a refusal repeats


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises CheckpointError for an architecture that is not in the table."""
    architectures = ConfigReader(config).texts("architectures")
    known = [name for name in architectures if name in FAMILIES]
    if len(known) != 1:
        given = ", ".join(map(excerpt, architectures[:MAX_NAMED])) or "none"
        raise CheckpointError(
            f"config.json names the architecture {given}, which is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[known[0]]
