# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Usage`: how many tokens one call took, counted as they come.

Rules: each prompt counts once, however many answers it gets; every token that was generated counts, those of answers
that `best_of` leaves out too, and those that are no part of a text, such as the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Counts so far."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }
