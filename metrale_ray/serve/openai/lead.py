# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Lead`: the prompt as its completions show it: its tokens, and with `echo` its text in front of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.serve.openai.decoded import decoded
from metrale_ray.serve.openai.logprobs import CompletionLogprobs, text_offsets
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.prompts import PromptRequest
from metrale_ray.serve.text import Tokenizer


@dataclass(slots=True)
class Lead:
    """One prompt. `text` and `offsets` are empty without echo, the latter without log probabilities too.

    `logprobs`, with echo, and `prompt_logprobs`: what the engine told of the prompt's tokens, once it did. All answers
    to the prompt share them.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    offsets: Sequence[int] = ()
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] = field(default_factory=list)


async def echoing(request: PromptRequest, tokenizer: Tokenizer | None, pace: Pace, *, is_scored: bool) -> Lead:
    """A prompt that is shown: the text that was given, or that of its token ids. Raises RequestError."""
    token_ids, skips = request.token_ids, request.params.skip_special_tokens
    text = request.text
    if text is None:
        text = "" if tokenizer is None else await decoded(token_ids, skips, tokenizer)
        await pace.did(len(token_ids))
    offsets = await text_offsets(token_ids, skips, tokenizer, pace) if is_scored else ()
    return Lead(token_ids, text, offsets)
