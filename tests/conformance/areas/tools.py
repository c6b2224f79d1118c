# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of tools. The arguments have only short values, so that any model comes to the end of a call."""

from __future__ import annotations

import json
from typing import Any

from openai.types.chat import ChatCompletionChunk

from tests.conformance.target import Target

NEEDS = ("chat", "tools")
MESSAGES: Any = [{"role": "user", "content": "Is it warm in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
STRICT: Any = {**CITY, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": STRICT}},
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": STRICT}},
]
NAMES = ("get_weather", "get_time")
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


def required_tools_are_called(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "stop")
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name in NAMES
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def a_named_tool_is_called(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=200
        )
    assert answer.choices[0].message.tool_calls
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


def a_stream_has_the_call_in_pieces(target: Target) -> None:
    asked: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0, "max_tokens": 200}
    with target.client() as client:
        whole = client.chat.completions.create(model=target.model, **asked).choices[0].message.tool_calls
        chunks = list(client.chat.completions.create(model=target.model, stream=True, **asked))
    names, ids, arguments = _pieces(chunks)
    assert names == ["get_time"]
    assert len(ids) == 1
    assert whole
    assert whole[0].type == "function"
    assert json.loads(arguments) == json.loads(whole[0].function.arguments)


def tools_that_may_be_called_do_no_harm(target: Target) -> None:
    with target.client() as client:
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(
                model=target.model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=12
            )
            assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
            if choice == "none":
                assert not answer.choices[0].message.tool_calls


def a_tools_result_is_taken(target: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
    ]
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=messages, tools=TOOLS, temperature=0, max_tokens=12
        )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def _pieces(chunks: list[ChatCompletionChunk]) -> tuple[list[str], list[str], str]:
    """The names, ids and joined arguments of the calls in a stream of one call."""
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
        if call.index == 0
    ]
    names = [delta.function.name for delta in deltas if delta.function and delta.function.name]
    ids = [delta.id for delta in deltas if delta.id]
    return names, ids, "".join((delta.function and delta.function.arguments) or "" for delta in deltas)
