# SPDX-License-Identifier: MIT OR Apache-2.0
"""`MESSAGE_SCHEMA`: a chat's message as the OpenAPI document describes it, role by role.

It says what `serve.messages` takes, as far as a schema can. It is for readers and generators of clients; nothing is
checked by it.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_NAME = {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "null"}]}
_ID = {"type": "string", "minLength": 1, "maxLength": 256}


def _content(*more: dict[str, Any]) -> dict[str, Any]:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _TEXT},
    }
    return {"anyOf": [_TEXT, {"type": "array", "items": part}, *more]}


def _message(roles: list[str], required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "properties": {"role": {"type": "string", "enum": roles}, "name": _NAME, **properties},
    }


_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _ID,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": _ID,
                "arguments": {"type": "string", "contentMediaType": "application/json", "examples": ["{}"]},
            },
        },
    },
}

MESSAGE_SCHEMA: dict[str, Any] = {
    "title": "Message",
    "anyOf": [
        _message(["system", "developer", "user"], ["content"], content=_content()),
        _message(
            ["assistant"],
            [],
            content=_content({"type": "null"}),
            reasoning_content=_TEXT_OR_NULL,
            tool_calls={"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        ),
        _message(["tool"], ["content", "tool_call_id"], content=_content(), tool_call_id=_ID),
    ],
}
