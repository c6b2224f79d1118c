# SPDX-License-Identifier: MIT OR Apache-2.0
"""`CompletionChoice`: one entry of a completion's choices, as a whole or in parts that join to the whole.

Rule: what is taken holds all that was added since it was last taken, so a stream's parts and a whole answer are made by
the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metrale_ray.serve.deltas import SequenceDelta
from metrale_ray.serve.openai.lead import Lead
from metrale_ray.serve.openai.logprobs import CompletionLogprobs
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.text import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """What a request wants to see of its answers.

    `logprobs`, `prompt_logprobs`: how many likely tokens, None for none. `has_echo`: the prompt comes first.
    `has_answer`: False where max_tokens is 0, as the engine always makes one token.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    has_echo: bool = False
    has_answer: bool = True
    has_token_ids: bool = False


@dataclass(slots=True)
class _New:
    """What was added and not taken."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)  # where they are told


class CompletionChoice:
    """One answer. `index` is its place among all choices of the call."""

    def __init__(self, index: int, shape: CompletionShape, lead: Lead, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.num_tokens = 0
        self.total_logprob = 0.0
        self._shape = shape
        self._lead = lead
        self._tokenizer = tokenizer
        self._is_first = True
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._new = _New()

    async def add(self, new: SequenceDelta, pace: Pace) -> None:
        """Take what is new. Nothing else is asked of this meanwhile."""
        self.num_tokens += len(new.token_ids)
        self.total_logprob += sum(
            entry[token_id].logprob for token_id, entry in zip(new.token_ids, new.logprobs, strict=False)
        )
        self._finish_reason, self._stop_reason = new.finish_reason, new.stop_reason
        if self._shape.has_answer:
            self._new.texts += new.texts
            self._new.token_ids += new.token_ids
            await self._add_logprobs(new, pace)
        elif new.finish_reason is not None:
            self._finish_reason, self._stop_reason = "length", None

    @property
    def mean_logprob(self) -> float:
        """How likely the answer is, per token."""
        return self.total_logprob / max(self.num_tokens, 1)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer has ended, once it has."""
        return self._finish_reason

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show since the last one was taken."""
        has_tokens = bool(self._new.token_ids) and (self._shape.logprobs is not None or self._shape.has_token_ids)
        has_lead = self._is_first and (self._shape.has_echo or self._shape.prompt_logprobs is not None)
        return not (has_tokens or has_lead or self._finish_reason is not None or any(self._new.texts))

    def take(self) -> dict[str, Any]:
        """OpenAI's choice object, of all that was added since the last one."""
        new, self._new = self._new, _New()
        is_first, self._is_first = self._is_first, False
        has_echo = is_first and self._shape.has_echo
        choice: dict[str, Any] = {
            "index": self.index,
            "text": "".join([self._lead.text, *new.texts] if has_echo else new.texts),
            "logprobs": self._logprobs(new, has_echo=has_echo),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._shape.has_token_ids:
            choice["token_ids"] = new.token_ids
            choice["prompt_token_ids"] = list(self._lead.token_ids) if is_first else None
        if self._shape.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._lead.prompt_logprobs if is_first else None
        return choice

    def _logprobs(self, new: _New, *, has_echo: bool) -> dict[str, Any] | None:
        if self._shape.logprobs is None:
            return None
        return new.logprobs.behind(self._lead.logprobs if has_echo else CompletionLogprobs())

    async def _add_logprobs(self, new: SequenceDelta, pace: Pace) -> None:
        count = self._shape.logprobs
        if count is not None:
            offsets = [len(self._lead.text) + offset for offset in new.offsets]
            await self._new.logprobs.add(new.token_ids, new.logprobs, offsets, count, self._tokenizer, pace)
