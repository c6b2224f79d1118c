# SPDX-License-Identifier: MIT OR Apache-2.0
"""`MESSAGE_SCHEMA`: a chat's message as the OpenAPI document describes it, role by role.

It says what `serve.messages` takes, as far as a schema can. It is for readers and generators of clients; nothing is
checked by it.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_NAME = {"type": "string", "minLength": 1, "maxLength": 256}
_NAME_OR_NULL = {"anyOf": [_NAME, {"type": "null"}]}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": _TEXT},
    },
}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _NAME,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _NAME, "arguments": {"type": "string", "description": "A JSON object's text."}},
        },
    },
}
_PLAIN = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user"]},
        "content": {"anyOf": [_TEXT, _PARTS]},
        "name": _NAME_OR_NULL,
    },
}
_OF_ASSISTANT = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
        "reasoning_content": _TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        "name": _NAME_OR_NULL,
    },
}
_OF_TOOL = {
    "type": "object",
    "required": ["role", "content", "tool_call_id"],
    "properties": {
        "role": {"const": "tool"},
        "content": {"anyOf": [_TEXT, _PARTS]},
        "tool_call_id": {"type": "string", "minLength": 1, "description": "The id of a call before it."},
        "name": _NAME_OR_NULL,
    },
}
MESSAGE_SCHEMA: dict[str, Any] = {"title": "Message", "anyOf": [_PLAIN, _OF_ASSISTANT, _OF_TOOL]}
