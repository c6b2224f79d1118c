# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities, in the forms of chats and of completions."""

from __future__ import annotations

import math
from typing import Any

from tests.conformance.target import Target

NEEDS = ("chat", "completions", "logprobs")
MESSAGES: Any = [{"role": "user", "content": "one two three"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 6}


def a_chat_has_the_logprobs_of_each_token(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
        )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert answer.usage is not None
    assert len(found.content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    for entry in found.content:
        assert math.isfinite(entry.logprob)
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # the most likely token was taken


def the_bytes_of_the_tokens_are_the_text(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(model=target.model, messages=MESSAGES, logprobs=True, **GREEDY)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in found.content)
    assert raw.decode("utf-8", "replace").startswith((answer.choices[0].message.content or "").rstrip("\ufffd"))
    assert all(entry.top_logprobs == [] for entry in found.content)


def a_chat_stream_has_the_same_logprobs(target: Target) -> None:
    asked: Any = {"model": target.model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    with target.client() as client:
        whole = client.chat.completions.create(**asked).choices[0].logprobs
        chunks = list(client.chat.completions.create(stream=True, **asked))
    assert whole is not None
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs and choice.logprobs.content else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content or []]


def without_the_field_a_chat_has_no_logprobs(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
    assert answer.choices[0].logprobs is None


def a_completion_has_logprobs_in_columns(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt="one two", logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert all(value is not None and value <= 0 and math.isfinite(value) for value in found.token_logprobs)
    assert found.text_offset == sorted(found.text_offset)


def an_echo_has_the_prompts_logprobs_and_none_for_its_first_token(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt="one two", logprobs=1, echo=True, **GREEDY)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert answer.usage is not None
    assert found.token_logprobs[0] is None
    assert all(value is not None for value in found.token_logprobs[1:])
    assert len(found.tokens) >= answer.usage.prompt_tokens + 1
