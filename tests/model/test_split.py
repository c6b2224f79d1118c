# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention split over the ranks: the whole model against transformers, for every family and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.group import Group
from tests.fixtures.tiny import random_prompt, reference_logits
from tests.model.test_transformer import error

LIMIT = 2e-5  # the promise is 1e-4
WORLDS = (2, 3, 4)
# 4 query heads over 2 kv heads: of 3 and 4 ranks some have no heads.
VARIANTS = (
    "mixtral",
    "mixtral, window",
    "mixtral, one kv head",
    "qwen3",
    "qwen3, mixed layers",
    "qwen3, tied",
    "qwen3, biases",
    "qwen3, window",
    "qwen3, all dense",
    "llama",
    "llama, no kv heads",
    "llama, tied",
    "llama, attention biases",
    "llama, mlp biases",
    "dense qwen3",
    "dense qwen3, tied",
    "dense qwen3, window in listed layers",
)
TINY = Callable[[str], Path]
REFERENCE = Callable[[str], Any]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference_in_one_pass_and_in_chunks(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, model = Group(tiny(variant), world, is_split=True), tiny_reference(variant)
    for slot, (length, chunk) in enumerate(((1, None), (33, None), (33, 5))):
        prompt = random_prompt(length)
        assert error(group.prompt(slot, prompt, chunk), reference_logits(model, prompt)) < LIMIT
