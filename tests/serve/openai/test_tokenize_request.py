# SPDX-License-Identifier: MIT OR Apache-2.0
"""A text or a conversation to tokenize, and ids to detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.openai.tokenize_request import parse_detokenize, parse_tokenize
from tests.serve.openai.bodies import CHAT, SETTINGS, TOOL, refused


def test_a_prompt_or_messages_are_tokenized() -> None:
    assert parse_tokenize({"prompt": ""}, SETTINGS).prompt == ""
    request = parse_tokenize({**CHAT, "tools": [TOOL], "chat_template_kwargs": {"a": 1}}, SETTINGS)
    assert (request.messages, request.opens_answer) == (CHAT["messages"], True)
    assert request.template_variables == {"a": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({**CHAT, "prompt": "a"}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({**CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({**CHAT, "chat_template": "x"}, "chat_template"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": [{}] * 5000}, "messages"),
        ({**CHAT, "tools": [{}]}, "tools[0].type"),
    ],
)
def test_what_is_wrong_with_a_tokenize_is_told(body: dict[str, Any], param: str) -> None:
    assert refused(parse_tokenize, body).param == param


def test_ids_are_detokenized() -> None:
    assert parse_detokenize({"tokens": [0, 5]}, SETTINGS).tokens == [0, 5]
    assert parse_detokenize({"tokens": []}, SETTINGS).tokens == []


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        (None, "tokens"),
        ("a", "tokens"),
        ([1, "a"], "tokens[1]"),
        ([True], "tokens[0]"),
        ([1.5], "tokens[0]"),
        ([-1], "tokens[0]"),
        ([2**32], "tokens[0]"),
    ],
)
def test_what_is_no_token_id_is_told_with_its_place(tokens: Any, param: str) -> None:
    assert refused(parse_detokenize, {"tokens": tokens}).param == param
