# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which parser reads an answer."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.errors import ConfigError
from metrale_ray.serve.parsing.choose import Place, make_parser, needs_special_tokens, reasoning_at, reasoning_marks
from tests.serve.parsing.reading import TOOLS, Answer, read
from tests.serve.pieces import piece_tokenizer

CALL = '<tool_call>{"name":"f"}</tool_call>'
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tool_parser", "tools", "choice", "has_calls"),
    [
        ("hermes", TOOLS, "auto", True),
        ("hermes", TOOLS, None, True),
        ("hermes", TOOLS, "none", False),
        ("hermes", [], "auto", False),
        (None, TOOLS, "auto", False),
        (None, TOOLS, "required", True),
        (None, TOOLS, NAMED, True),
        ("mistral", TOOLS, "required", False),
    ],
)
def test_calls_are_read_where_tools_may_be_called(
    tool_parser: str | None, tools: list[dict[str, Any]], choice: Any, has_calls: bool
) -> None:
    answer = read(make_parser(tool_parser, None, tools, choice), [CALL])
    assert answer == (Answer("", [("f", "{}")], True) if has_calls else Answer(CALL))


def test_reasoning_is_read_where_tools_are_not() -> None:
    answer = read(make_parser("hermes", "think", TOOLS, "none"), [f"<think>a</think>{CALL}"])
    assert answer == Answer(CALL, reasoning="a")
    assert read(make_parser(None, None, TOOLS), ["<think>a"]) == Answer("<think>a")


def test_a_parser_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"tool parser 'x'; use hermes or llama3_json or mistral"):
        make_parser("x", None, [])
    with pytest.raises(ConfigError, match=r"reasoning parser 'x'; use think or think_open"):
        make_parser(None, "x", [])


def test_special_tokens_stay_in_the_text_where_a_marker_is_one() -> None:
    assert [needs_special_tokens(name) for name in ("mistral", "llama3_json", "hermes", None)] == [
        True,
        True,
        False,
        False,
    ]
    calls = piece_tokenizer(["a", "<tool_call>"], special=[1])
    thinks = piece_tokenizer(["</think>", "<tool_call>"], special=[0])
    assert needs_special_tokens("hermes", None, calls)
    assert not needs_special_tokens(None, "think", calls)
    assert not needs_special_tokens("hermes", None, thinks)
    assert needs_special_tokens("hermes", "think", thinks)


@pytest.mark.parametrize(
    ("prompt", "where", "where_unseen"),
    [
        ("assistant\n<think>\n", "open", "open"),
        ("assistant\n<think>\n\n</think>\n\n", "closed", "closed"),
        ("<think> what is </think>? assistant\n", "undecided", "open"),
        ("assistant\n", "undecided", "open"),
    ],
)
def test_where_an_answer_begins_is_seen_at_the_end_of_its_prompt(
    prompt: str, where: Place, where_unseen: Place
) -> None:
    assert reasoning_at(prompt, "think") == where
    assert reasoning_at(prompt, "think_open") == where_unseen
    assert reasoning_at(prompt, None) == "closed"
    assert reasoning_at(prompt, "think_open", opens_answer=False) == where


def test_a_constraint_begins_at_once_behind_reasoning_or_either() -> None:
    assert reasoning_marks("closed") == (None, None)
    assert reasoning_marks("open") == ("</think>", None)
    assert reasoning_marks("undecided") == ("</think>", "<think>")
