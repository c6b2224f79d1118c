# SPDX-License-Identifier: MIT OR Apache-2.0
"""The prompts that every engine is asked: which experts are read depends on the tokens."""

from __future__ import annotations

import random

VOCAB_SIZE = 32_000
FIRST_WORD = 3  # before it are the special tokens


def prompts(count: int, length: int) -> list[list[int]]:
    """So many prompts of random token ids. Row i is the same whatever the count."""
    return [_prompt(row, length) for row in range(count)]


def _prompt(row: int, length: int) -> list[int]:
    chance = random.Random(7_000_021 + row)
    return [chance.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(length)]
