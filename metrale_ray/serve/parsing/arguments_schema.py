# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the schema of a function's parameters says of the arguments that a grammar lets a model write.

Rules. Arguments are an object. A function without parameters has none. Properties that a plain schema does not name are
not written, though it may allow them: a function does not know them. What is written is always valid by the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metrale_ray.errors import RequestError

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's, as `serve.openai.tool_fields` checked them: [{"type": "function", "function": {"name": ..., ...}}]."""

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords with which a schema speaks of properties that it does not name.
_OPEN_KEYWORDS = {
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "if",
    "minProperties",
    "oneOf",
    "patternProperties",
    "unevaluatedProperties",
}


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of the arguments of a checked tool."""
    given = tool["function"].get("parameters")
    schema = {**(given or NO_ARGUMENTS), "type": "object"}
    return {**schema, "additionalProperties": False} if _is_closed(schema) else schema


def check_parameters(tools: Tools) -> None:
    """Raises RequestError for a function whose parameters are no JSON schema of an object, naming it."""
    for index, tool in enumerate(tools):
        given = tool["function"].get("parameters")
        kind = given.get("type", "object") if isinstance(given, Mapping) else "object" if given is None else given
        if kind != "object":
            param = f"tools[{index}].function.parameters"
            raise RequestError(
                f"{param} must be a JSON schema of an object; its type is {str(kind)[:80]!r}. "
                'Write {"type": "object", "properties": {...}}',
                param=param,
            )


def _is_closed(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or _OPEN_KEYWORDS & schema.keys():
        return False
    return all(isinstance(name, str) and name in properties for name in required)
