# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tools stay as the client wrote them, and a choice is one of them."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.tool_fields import chosen_function
from tests.serve.openai.bodies import CHAT, SETTINGS, TOOL, refused


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", **function}}


def _named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_stay_as_they_were_written() -> None:
    tools = [{**_tool(parameters=None, extra=[1]), "more": 1}, _named("other")]
    request = parse_chat(CHAT | {"tools": tools, "tool_choice": _named("other")}, SETTINGS)
    assert request.tools == tools
    assert chosen_function(request.choice_of_tools) == "other"
    assert chosen_function("required") is None
    assert parse_chat(CHAT | {"tools": tools}, SETTINGS).choice_of_tools == "auto"


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_choice_that_demands_nothing_needs_no_tools(choice: str) -> None:
    assert parse_chat(CHAT | {"tools": [], "tool_choice": choice}, SETTINGS).choice_of_tools == choice


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([5], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
        ([TOOL, {"type": "function", "function": {}}], "tools[1].function.name"),
        ([_named("")], "tools[0].function.name"),
        ([_named("a b")], "tools[0].function.name"),
        ([_named("look\n")], "tools[0].function.name"),
        ([_named("x" * 65)], "tools[0].function.name"),
        ([_tool(parameters="{}")], "tools[0].function.parameters"),
        ([_tool(strict=1)], "tools[0].function.strict"),
        ([TOOL, TOOL], "tools[1].function.name"),
        ([TOOL, _tool(name="b", parameters={"enum": ["x" * 2**16]})], "tools[1].function.parameters"),
    ],
)
def test_a_wrong_tool_is_told_with_its_place(tools: Any, param: str) -> None:
    assert refused(parse_chat, CHAT | {"tools": tools}).param == param


@pytest.mark.parametrize(
    "choice", ["any", "", 5, True, [], {}, {"type": "function"}, _named(5), {"type": "allowed_tools"}, _named("unseen")]
)
def test_a_wrong_choice_is_refused(choice: Any) -> None:
    assert refused(parse_chat, CHAT | {"tools": [TOOL], "tool_choice": choice}).param == "tool_choice"
