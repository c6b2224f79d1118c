# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ServeLimits`: how much one HTTP request may ask for. Each has a default here and a flag of its name.

Rules: a small body must not order a large amount of work. What is larger is refused with 400 or 413 that names the
limit, before any work is done for it. The engine's own limits (`sampling.token_params`) hold besides, and are the most
that a flag may allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from metrale_ray.errors import ConfigError
from metrale_ray.sampling.params import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from metrale_ray.sampling.token_params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_N


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """All limits of one service. Sizes in bytes, times in seconds. Raises ConfigError for a value that is none."""

    max_n: int = 16
    max_best_of: int = 16
    max_stop_strings: int = 16
    max_stop_characters: int = 256
    max_logprobs: int = MAX_LOGPROBS
    max_logit_biases: int = 1024
    max_prompts: int = 256
    max_messages: int = 4096
    max_tools: int = 128
    max_body_bytes: int = 4 * 2**20
    max_body_depth: int = 100
    max_schema_bytes: int = 64 * 1024
    max_request_s: float = 3600.0
    body_timeout_s: float = 30.0
    grammar_timeout_s: float = 2.0
    template_timeout_s: float = 2.0
    max_template_characters: int = 4 * 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = float if field.name.endswith("_s") else int
            is_right = not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
            if not is_right or not math.isfinite(value) or value <= 0:
                what = "a number of seconds" if kind is float else "an integer"
                raise ConfigError(f"{field.name} is {value!r}; it must be {what} above 0")
            most = _MOST.get(field.name)
            if most is not None and value > most:
                raise ConfigError(f"{field.name} is {value}; the engine allows at most {most}. Lower it.")


_MOST: dict[str, int] = {
    "max_n": MAX_N,
    "max_best_of": MAX_N,
    "max_stop_strings": MAX_STOP_STRINGS,
    "max_stop_characters": MAX_STOP_CHARACTERS,
    "max_logprobs": MAX_LOGPROBS,
    "max_logit_biases": MAX_LOGIT_BIASES,
    "max_body_depth": 200,  # the JSON parser's own
    "max_schema_bytes": 2**18,  # what a frame to the head takes
}
