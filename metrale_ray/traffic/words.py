# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where prompts come from: `Words` makes up texts, `TokenIds` lists of token ids; `Given` has those of a file.

Rules: what is drawn depends on the given chance alone. A text's length is near what was asked; how near depends on the
server's tokenizer, and the server's own count is what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from metrale_ray.traffic.question import Prompt

# Short and common, so that most tokenizers have one token for each of them with the space before it.
TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"
    " what all were we when your can said there use an each which she do how their if will up other about out many then"
    " them these so some her would make like him into time has look two more write go see number no way could people my"
    " than first water been call who oil its now find long down day did get come made may part"
)


class PromptMaker(Protocol):
    """Makes prompts of a length in tokens."""

    def make(self, num_tokens: int, random: Random, number: int) -> Prompt:
        """The prompt of request `number`: one of `num_tokens` tokens, or near it."""
        ...


@dataclass(frozen=True, slots=True)
class Words:
    """Texts. `tokens_per_word`: what the server's tokenizer makes of a word, if that is known."""

    tokens_per_word: float = 1.0

    def make(self, num_tokens: int, random: Random, number: int) -> str:
        """A text of about `num_tokens` tokens, at least one word."""
        return " ".join(random.choices(TEXT.split(), k=max(1, round(num_tokens / self.tokens_per_word))))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Lists of token ids, all of them out of `pool`."""

    pool: Sequence[int]

    def make(self, num_tokens: int, random: Random, number: int) -> list[int]:
        """Exactly `num_tokens` token ids."""
        return random.choices(self.pool, k=num_tokens)


@dataclass(frozen=True, slots=True)
class Given:
    """Prompts that were given, one after another; when they are through, the first comes again."""

    prompts: Sequence[Prompt]

    def make(self, num_tokens: int, random: Random, number: int) -> Prompt:
        """The prompt of request `number`, of whatever length it is."""
        return self.prompts[number % len(self.prompts)]
