# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers that are JSON, and of a given schema. The schemas allow only short texts, so any model comes to an end."""

from __future__ import annotations

import json
from typing import Any, Literal

import pydantic

from tests.conformance.areas.chat import text_of
from tests.conformance.target import Target

NEEDS = ("chat", "schemas")
MESSAGES: Any = [{"role": "user", "content": "Describe a thing as JSON."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "is_new": {"type": "boolean"}},
    "required": ["colour", "is_new"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


class Thing(pydantic.BaseModel):
    """What is described."""

    colour: Literal["red", "green"]
    is_new: bool


def an_answer_has_the_schema(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=MESSAGES, response_format=FORMAT, temperature=0, max_tokens=200
        )
    found = json.loads(answer.choices[0].message.content or "")
    assert found.keys() == {"colour", "is_new"}
    assert found["colour"] in ("red", "green")
    assert isinstance(found["is_new"], bool)
    assert answer.choices[0].finish_reason == "stop"


def a_stream_has_the_schema(target: Target) -> None:
    with target.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=target.model, messages=MESSAGES, response_format=FORMAT, max_tokens=200, stream=True
            )
        )
    Thing.model_validate_json(text_of(chunks))


def several_choices_have_the_schema(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=MESSAGES, response_format=FORMAT, max_tokens=200, n=2, temperature=1.0
        )
    for choice in answer.choices:
        Thing.model_validate_json(choice.message.content or "")


def parse_gives_an_object_of_the_class(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.parse(
            model=target.model, messages=MESSAGES, response_format=Thing, max_tokens=200
        )
    assert isinstance(answer.choices[0].message.parsed, Thing)


def the_stream_helper_collects_an_object_of_the_class(target: Target) -> None:
    with (
        target.client() as client,
        client.chat.completions.stream(
            model=target.model, messages=MESSAGES, response_format=Thing, max_tokens=200
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(answer.choices[0].message.parsed, Thing)


def a_format_of_text_changes_nothing(target: Target) -> None:
    asked: Any = {"model": target.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    with target.client() as client:
        plain = client.chat.completions.create(**asked)
        text = client.chat.completions.create(response_format={"type": "text"}, **asked)
    assert plain.choices[0].message.content == text.choices[0].message.content


def a_json_object_begins_as_one(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=64
        )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
