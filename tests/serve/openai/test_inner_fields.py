# SPDX-License-Identifier: MIT OR Apache-2.0
"""What nobody knows is found wherever it stands, and what is known or a caller's own is not."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.messages import normal_messages
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.inner_fields import MESSAGE, TOOL, unknown_inside
from metrale_ray.serve.openai.request import unknown_fields
from metrale_ray.serve.openai.tokenize_request import parse_tokenize
from tests.serve.openai.bodies import CHAT, SETTINGS, refused
from tests.serve.openai.bodies import TOOL as LOOK

CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}"}}
KNOWN: list[dict[str, Any]] = [
    {"role": "system", "content": "x", "name": None},
    {"role": "developer", "content": [{"type": "text", "text": "x"}]},
    {"role": "user", "content": "x", "name": "n", "extra": None},
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}], "reasoning_content": "y"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning": "y", "thinking": "z"},
    {"role": "tool", "tool_call_id": "c", "content": ""},
]


def test_all_that_a_conversation_is_made_of_is_known() -> None:
    assert normal_messages(KNOWN, 10)
    assert list(unknown_inside(KNOWN, MESSAGE, "messages")) == []
    own = {"type": "object", "properties": {"anything": {"title": "x"}}, "more": 1}
    tool = {"type": "function", "function": {"name": "a", "description": "b", "strict": True, "parameters": own}}
    assert list(unknown_inside([tool], TOOL, "tools")) == []


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": "x", "foo": 1}, "messages[1].foo"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}, "messages[1].content[0].cache"),
        ({"role": "assistant", "tool_calls": [CALL, {**CALL, "foo": {}}]}, "messages[1].tool_calls[1].foo"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "b": 1}}]},  # type: ignore[dict-item]
            "messages[1].tool_calls[0].function.b",
        ),
    ],
)
def test_what_nobody_knows_in_a_message_is_listed_with_its_place_and_refused_where_all_is_known(
    message: dict[str, Any], place: str
) -> None:
    body = {"messages": [*CHAT["messages"], message]}
    for read in (parse_chat, parse_tokenize):
        assert unknown_fields(read(body, SETTINGS)) == [place]
        error = refused(read, body, ApiSettings(strict=True))
        assert (error.code, error.param) == ("unknown_field", place)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"tools": [LOOK, {**LOOK, "function": {"name": "b"}, "foo": 1}]}, "tools[1].foo"),
        ({"tools": [{"type": "function", "function": {"name": "b", "returns": {}}}]}, "tools[0].function.returns"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}, "x": 1}}, "tool_choice.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"y": 1}, "x": 1}}},
            "response_format.json_schema.x",
        ),
    ],
)
def test_what_nobody_knows_of_tools_and_forms_is_listed_too(more: dict[str, Any], place: str) -> None:
    assert unknown_fields(parse_chat(CHAT | more, SETTINGS)) == [place]
    assert refused(parse_chat, CHAT | more, ApiSettings(strict=True)).param == place


@pytest.mark.parametrize("given", [None, 5, "x", [], [5, None, "x"], {}, {"role": 5}, [{"content": 5, "role": "user"}]])
def test_values_of_a_wrong_kind_are_others_matter(given: Any) -> None:
    assert list(unknown_inside(given, MESSAGE, "messages")) == []
