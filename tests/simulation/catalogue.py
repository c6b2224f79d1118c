# SPDX-License-Identifier: MIT OR Apache-2.0
"""The catalogue: every request that the simulation makes, but for its length, its priority and its deadline.

Each entry is a prompt and parameters, and its answer is known (`oracle`). First tokens differ between entries, so that
a fault of the engine can be for one of them. Prompts are short and long against blocks of four tokens and chunks of
a few; the parameters are those that a scheduler could get wrong when it cuts, preempts and repeats.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.grammar.texts import grammar_text, of_choice, of_json, of_regex
from metrale_ray.sampling.token_params import TokenParams
from tests.simulation.tiny_model import VOCAB_SIZE

MAX_TOKENS = 12
"""The longest answer: long enough to cross blocks of four tokens three times."""

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STOPS = tuple(range(2, VOCAB_SIZE, 5))
"""One token of five ends an answer that has these."""


CHANCE = 1010
"""With these prompts answers are of many lengths and their tokens differ: no mistake hides in repetition."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of the catalogue. `least`: the fewest tokens that it may be asked for."""

    name: str
    prompt: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    least: int = 1

    @property
    def has_own_seed(self) -> bool:
        """Whether its seed is its request's own, or makes no difference. If not, the engine derives one from its id."""
        return self.fields.get("temperature", 0) == 0 or "seed" in self.fields

    @property
    def n(self) -> int:
        """Its sequences."""
        return int(self.fields.get("n", 1))

    def params(self, max_tokens: int | None = MAX_TOKENS) -> TokenParams:
        """What it is sent with."""
        return TokenParams(**{"temperature": 0, "ignore_eos": True, **self.fields, "max_tokens": max_tokens})


def catalogue() -> tuple[Entry, ...]:
    """All entries; which one is at an index never changes within a build."""
    shapes: list[tuple[str, int, dict[str, Any], int]] = [
        *((f"greedy {length}", length, {}, 1) for length in (1, 2, 3, 4, 5, 8, 13, 21)),
        ("ends by itself", 3, {"ignore_eos": False, "end_token_ids": STOPS[:20]}, 1),
        ("stops", 6, {"stop_token_ids": STOPS}, 1),
        ("stops later", 7, {"stop_token_ids": STOPS, "min_tokens": 4}, 4),
        ("sampled", 4, {"temperature": 0.9, "seed": 7}, 1),
        ("sampled from few", 9, {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, 1),
        ("two", 5, {"temperature": 1.0, "seed": 9, "n": 2}, 1),
        ("three", 11, {"temperature": 1.0, "seed": 10, "n": 3, "stop_token_ids": STOPS[:30]}, 1),
        ("penalties", 6, {"repetition_penalty": 1.8, "presence_penalty": 2.0, "frequency_penalty": 2.0}, 1),
        ("sampled with penalties", 5, {"temperature": 0.8, "seed": 11, "presence_penalty": 2.0}, 1),
        ("few allowed", 4, {"allowed_token_ids": tuple(range(30, 60)), "logit_bias": {31: 3.0, 40: -5.0}}, 1),
        ("logprobs", 7, {"logprobs": 2}, 1),
        ("prompt logprobs", 14, {"logprobs": 0, "prompt_logprobs": 1}, 1),
        ("grammar of a choice", 4, {"grammar": grammar_text(of_choice(["one", "two three", "four"]))}, 1),
        ("grammar of a pattern", 10, {"grammar": grammar_text(of_regex("[a-d]{2,9}")), "temperature": 1, "seed": 3}, 1),
        ("grammar of JSON", 5, {"grammar": grammar_text(of_json(json.dumps(SCHEMA))), "n": 2, "seed": 4}, 1),
        ("two without a seed", 4, {"temperature": 1.0, "n": 2}, 1),
        (
            "two with prompt logprobs",
            9,
            {"temperature": 1.0, "seed": 12, "n": 2, "logprobs": 0, "prompt_logprobs": 0},
            1,
        ),
    ]
    return tuple(
        Entry(name, _prompt(index, length), fields, least) for index, (name, length, fields, least) in enumerate(shapes)
    )


def _prompt(index: int, length: int) -> tuple[int, ...]:
    """Its first token is its own; the others are chance."""
    rest = random.Random(CHANCE + index)
    return (100 + index, *(rest.randrange(1, VOCAB_SIZE) for _ in range(length - 1)))
