# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fields of a chat that speak of tools: `tools` and `tool_choice`, kept as the client wrote them.

Rules: only functions are tools. A choice names a function that is there. Null inside a tool is not given.
What it leaves out: whether a schema can be compiled, and how a model is told of its tools (`serve.parsing`,
`serve.templates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict

from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.fields import Object
from metrale_ray.serve.openai.mistakes import shown
from metrale_ray.serve.openai.structured import OPEN, check_size

_WORDS = ("none", "auto", "required")


@with_config(OPEN)
class FunctionTool(TypedDict):
    """One function that a model may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[Object | None, Field(description="The JSON schema of the arguments.")]]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class Tool(TypedDict):
    """One tool."""

    type: Literal["function"]
    function: FunctionTool


def _choice(given: Any) -> Any:
    is_named = isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("function"), dict)
    if given not in _WORDS and not (is_named and isinstance(given["function"].get("name"), str)):
        raise ValueError(
            "must be 'none', 'auto', 'required', or one function: "
            '{"type": "function", "function": {"name": ...}}; other kinds are not supported'
        )
    return given


ToolChoice = Annotated[
    Any,
    AfterValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(_WORDS)},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ]
        }
    ),
]
"""OpenAI's: a word, or an object that names one function."""


def chosen_function(tool_choice: str | Object | None) -> str | None:
    """The name of the one function that must be called, or None."""
    return str(tool_choice["function"]["name"]) if isinstance(tool_choice, dict) else None


def check_tools(tools: Sequence[Tool], tool_choice: str | Object | None, limits: ServeLimits) -> None:
    """Raise ApiError where a choice has no tool, two tools one name, or a schema is too large."""
    names = [tool["function"]["name"] for tool in tools]
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        if names.index(names[index]) != index:
            raise bad_request(f"{param}.name is {shown(names[index])} a second time; rename one", param=f"{param}.name")
        check_size(f"{param}.parameters", tool["function"].get("parameters") or {}, limits)
    if tool_choice in (None, "none", "auto"):
        return
    if not tools:
        raise bad_request(
            f"tool_choice is {shown(tool_choice)}, and there are no tools; give some", param="tool_choice"
        )
    named = chosen_function(tool_choice)
    if named is not None and named not in names:
        raise bad_request(
            f"tool_choice names {shown(named)}, which is none of the tools; give one of theirs", param="tool_choice"
        )
