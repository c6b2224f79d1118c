# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities in the shapes of OpenAI's two interfaces, and of vLLM's for prompts.

Rules. Numbers are natural logarithms of the model's own distribution, before temperature and every other parameter,
and always finite (`LOGPROB_FLOOR` is the least). In completions a token that is a part of a character is written as
OpenAI does, `bytes:\\xe2\\x80`, and of two candidates with one text the less likely is written as `token_id:N`, so that
none is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metrale_ray.serve.openai.token_bytes import token_bytes
from metrale_ray.serve.outputs import Logprob
from metrale_ray.serve.text import REPLACEMENT, IncrementalDetokenizer, Tokenizer

Entry = dict[int, Logprob]


def chat_logprobs(entries: Sequence[Entry], count: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """The list `content` for these tokens, each with the `count` most likely ones in its place."""
    return [
        {
            **_chat_token(*next(iter(entry.items())), tokenizer),
            "top_logprobs": [_chat_token(*candidate, tokenizer) for candidate in _likeliest(entry, count)],
        }
        for entry in entries
    ]


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    offsets: Sequence[int],
    count: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Four lists of one length; the entry of a text's first token is None. A token is always among its own top."""
    return {
        "tokens": [_completion_token(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [
            None if entry is None else entry[token_id].logprob
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": [None if entry is None else _named(entry, count, tokenizer) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(entries: Sequence[Entry | None], count: int) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's list: by token id, as JSON's names are strings; each token itself and the `count` most likely ones."""
    return [None if entry is None else _by_id(entry, count) for entry in entries]


def text_offsets(token_ids: Sequence[int], skip_special_tokens: bool, tokenizer: Tokenizer | None) -> list[int]:
    """The characters of text before each token, as far as they are certain then."""
    if tokenizer is None:
        return [0] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    offsets, num_characters = [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        num_characters += len(detokenizer.push([token_id]))
    return offsets


def _likeliest(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """The first `count` by rank. The entry has its own token first, and the others in order behind it."""
    return sorted(((i, one) for i, one in entry.items() if one.rank <= count), key=lambda item: item[1].rank)[:count]


def _by_id(entry: Entry, count: int) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for place, (token_id, one) in enumerate(entry.items())
        if place == 0 or one.rank <= count
    }


def _chat_token(token_id: int, one: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None or one.decoded_token is None:
        return {"token": f"token_id:{token_id}", "logprob": one.logprob, "bytes": None}
    return {
        "token": one.decoded_token,
        "logprob": one.logprob,
        "bytes": list(token_bytes(tokenizer, token_id)),
    }


def _named(entry: Entry, count: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    own = next(iter(entry))
    candidates = dict(_likeliest(entry, count))
    candidates.setdefault(own, entry[own])
    found: dict[str, float] = {}
    for token_id, one in candidates.items():
        name = _completion_token(token_id, tokenizer)
        found[f"token_id:{token_id}" if name in found else name] = one.logprob
    return found


def _completion_token(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"token_id:{token_id}"
    text = tokenizer.token_text(token_id)
    if REPLACEMENT not in text:
        return text
    data = token_bytes(tokenizer, token_id)
    return text if data == text.encode() else "bytes:" + "".join(f"\\x{value:02x}" for value in data)
