# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chats: whole answers and streams, over the synchronous and the asynchronous client."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletionChunk

from tests.conformance.target import Target

NEEDS = ("chat",)
MESSAGES: Any = [{"role": "user", "content": "one two three"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    """The text that the chunks have for one choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def a_chat_is_answered(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == target.model
    assert answer.id
    assert answer.created > 0
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert not choice.message.tool_calls
    assert choice.finish_reason in ("stop", "length")


def a_chat_counts_its_tokens(target: Target) -> None:
    with target.client() as client:
        usage = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY).usage
        longer = client.chat.completions.create(
            model=target.model, messages=[{"role": "user", "content": "one two three " * 4}], **GREEDY
        ).usage
    assert usage is not None
    assert longer is not None
    assert 0 < usage.completion_tokens <= GREEDY["max_tokens"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert longer.prompt_tokens > usage.prompt_tokens > 0


def a_chat_stream_has_the_role_first_and_one_end(target: Target) -> None:
    with target.client() as client:
        chunks = list(client.chat.completions.create(model=target.model, messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" and chunk.model == target.model for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) <= {None}
    assert all(chunk.usage is None for chunk in chunks)


def a_chat_stream_has_the_text_of_the_whole_answer(target: Target) -> None:
    with target.client() as client:
        whole = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
        chunks = list(client.chat.completions.create(model=target.model, messages=MESSAGES, stream=True, **GREEDY))
    assert text_of(chunks) == whole.choices[0].message.content


def a_chat_stream_ends_with_usage_where_it_is_asked_for(target: Target) -> None:
    with target.client() as client:
        whole = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
        chunks = list(
            client.chat.completions.create(
                model=target.model,
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                **GREEDY,
            )
        )
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last, first = chunks[-1].usage, whole.usage
    assert last is not None
    assert first is not None
    assert (last.prompt_tokens, last.completion_tokens) == (first.prompt_tokens, first.completion_tokens)


def a_chat_stream_may_be_left(target: Target) -> None:
    with target.client() as client:
        stream = client.chat.completions.create(model=target.model, messages=MESSAGES, stream=True, max_tokens=200)
        next(iter(stream))
        stream.close()
        again = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
    assert again.choices[0].finish_reason


async def an_asynchronous_chat_is_the_same(target: Target) -> None:
    async with target.async_client() as client:
        whole = await client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
        stream = await client.chat.completions.create(model=target.model, messages=MESSAGES, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
    assert text_of(chunks) == whole.choices[0].message.content


def a_system_message_and_turns_are_taken(target: Target) -> None:
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    with target.client() as client:
        long = client.chat.completions.create(model=target.model, messages=messages, **GREEDY).usage
        short = client.chat.completions.create(model=target.model, messages=messages[-1:], **GREEDY).usage
    assert long is not None
    assert short is not None
    assert long.prompt_tokens > short.prompt_tokens


def a_developer_message_is_a_system_message(target: Target) -> None:
    texts, counts = [], []
    with target.client() as client:
        for role in ("system", "developer"):
            messages: Any = [{"role": role, "content": "Be short."}, *MESSAGES]
            answer = client.chat.completions.create(model=target.model, messages=messages, **GREEDY)
            texts.append(answer.choices[0].message.content)
            counts.append(answer.usage and answer.usage.prompt_tokens)
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]


def parts_of_text_are_a_text(target: Target) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "one two three"}]}]
    with target.client() as client:
        one = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
        other = client.chat.completions.create(model=target.model, messages=parts, **GREEDY)
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage == other.usage
