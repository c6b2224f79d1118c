# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities in the shapes of OpenAI's two interfaces, and of vLLM's for prompts.

Rules. Numbers are natural logarithms of the model's own distribution, before temperature and every other parameter,
and always finite (`LOGPROB_FLOOR` is the least). In completions a token that is a part of a character is written as
OpenAI does, `bytes:\\xe2\\x80`, and of two candidates with one text the less likely is written as `token_id:N`, so that
none is lost. A prompt has thousands of places with dozens of candidates each: the event loop turns in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.token_bytes import token_byte_values, token_bytes
from metrale_ray.serve.outputs import Logprob
from metrale_ray.serve.text import REPLACEMENT, IncrementalDetokenizer, Tokenizer

Entry = dict[int, Logprob]
Told = TypeVar("Told")

PLACES_AT_ONCE = 64
"""Places that are told in one go, each with at most a hundred or so candidates."""

ITEMS_PER_PUSH = 20
"""What a detokenizer takes for one token, in items of a `Pace`."""


@dataclass(slots=True)
class CompletionLogprobs:
    """OpenAI's four lists, of one length. The entries of a text's first token are None."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def behind(self, other: CompletionLogprobs) -> dict[str, list[Any]]:
        """OpenAI's object of both, what `other` has first."""
        return {
            "tokens": other.tokens + self.tokens,
            "token_logprobs": other.token_logprobs + self.token_logprobs,
            "top_logprobs": other.top_logprobs + self.top_logprobs,
            "text_offset": other.text_offset + self.text_offset,
        }

    async def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry | None],
        offsets: Sequence[int],
        count: int,
        tokenizer: Tokenizer | None,
        pace: Pace,
    ) -> None:
        """Put these tokens behind the others, each with the `count` most likely ones, and always itself among them."""

        def named(entry: Entry | None) -> dict[str, float] | None:
            return None if entry is None else _named(entry, count, tokenizer)

        self.tokens += [_completion_token(token_id, tokenizer) for token_id in token_ids]
        self.token_logprobs += [
            None if entry is None else entry[token_id].logprob
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
        self.top_logprobs += await _in_turns(entries, named, count, pace)
        self.text_offset += offsets


async def chat_logprobs(
    entries: Sequence[Entry], count: int, tokenizer: Tokenizer | None, pace: Pace
) -> list[dict[str, Any]]:
    """The list `content` for these tokens, each with the `count` most likely ones in its place."""
    return await _in_turns(entries, lambda entry: _chat_entry(entry, count, tokenizer), count, pace)


async def prompt_logprobs(
    entries: Sequence[Entry | None], count: int, pace: Pace
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's list: by token id, as JSON's names are strings; each token itself and the `count` most likely ones."""
    return await _in_turns(entries, lambda entry: None if entry is None else _by_id(entry, count), count, pace)


async def text_offsets(
    token_ids: Sequence[int], skip_special_tokens: bool, tokenizer: Tokenizer | None, pace: Pace
) -> list[int]:
    """The characters of text before each token, as far as they are certain then."""
    if tokenizer is None:
        return [0] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    offsets, num_characters = [], 0
    for token_id in token_ids:
        offsets.append(num_characters)
        num_characters += len(detokenizer.push([token_id]))
        await pace.did(ITEMS_PER_PUSH)
    return offsets


async def _in_turns(
    entries: Sequence[Entry] | Sequence[Entry | None], told: Callable[[Any], Told], count: int, pace: Pace
) -> list[Told]:
    found: list[Told] = []
    for start in range(0, len(entries), PLACES_AT_ONCE):
        part = entries[start : start + PLACES_AT_ONCE]
        found += [told(entry) for entry in part]
        await pace.did(len(part) * (count + 1))
    return found


def _likeliest(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """The first `count` by rank. The entry has its own token first, and the others in order behind it."""
    own, *others = entry.items()
    found = [item for item in others if item[1].rank <= count]
    rank = own[1].rank
    if rank <= count:
        place = next((place for place, (_, one) in enumerate(found) if one.rank >= rank), len(found))
        found.insert(place, own)
    return found[:count]


def _by_id(entry: Entry, count: int) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for place, (token_id, one) in enumerate(entry.items())
        if place == 0 or one.rank <= count
    }


def _chat_entry(entry: Entry, count: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        **_chat_token(*next(iter(entry.items())), tokenizer),
        "top_logprobs": [_chat_token(token_id, one, tokenizer) for token_id, one in _likeliest(entry, count)],
    }


def _chat_token(token_id: int, one: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None or one.decoded_token is None:
        return {"token": f"token_id:{token_id}", "logprob": one.logprob, "bytes": None}
    values = token_byte_values(tokenizer, token_id)
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": values}


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
    name = tokenizer.known_names.get(token_id)
    if name is None:
        name = tokenizer.known_names[token_id] = _name(token_id, tokenizer)
    return name


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    text = tokenizer.token_text(token_id)
    if REPLACEMENT not in text:
        return text
    data = token_bytes(tokenizer, token_id)
    return text if data == text.encode() else "bytes:" + "".join(f"\\x{value:02x}" for value in data)
