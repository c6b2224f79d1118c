# SPDX-License-Identifier: MIT OR Apache-2.0
"""`decoded`: the text of token ids, many of them in a thread and in parts.

Rule: the tokenizer holds the interpreter's lock while it decodes, so a thread alone would not help.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrale_ray.serve.text import IncrementalDetokenizer, Tokenizer
from metrale_ray.serve.text_threads import in_text_thread

IDS_AT_ONCE = 1024
"""Decoded in about a millisecond."""

CHARACTERS_PER_TOKEN = 4
"""Of usual texts: how long a text its tokens are taken for."""


async def decoded(token_ids: Sequence[int], skip_special_tokens: bool, tokenizer: Tokenizer) -> str:
    """`tokenizer.decode`. Raises RequestError "too_many_requests" when too many long texts wait."""
    if len(token_ids) <= IDS_AT_ONCE:
        return tokenizer.decode(token_ids, skip_special_tokens)

    def in_parts() -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        starts = range(0, len(token_ids), IDS_AT_ONCE)
        texts = [detokenizer.push(token_ids[start : start + IDS_AT_ONCE]) for start in starts]
        return "".join([*texts, detokenizer.flush()])

    return await in_text_thread(CHARACTERS_PER_TOKEN * len(token_ids), in_parts)
