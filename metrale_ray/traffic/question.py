# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Question`: one request of a run, before it is written for a certain server."""

from __future__ import annotations

from dataclasses import dataclass

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the tokens to generate. `due_s`: seconds after the start; None: when the one before has ended."""

    prompt: Prompt
    max_tokens: int
    due_s: float | None = None
