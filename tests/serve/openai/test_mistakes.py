# SPDX-License-Identifier: MIT OR Apache-2.0
"""What was given is shown in few characters, and a refusal speaks of the client's field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.mistakes import MAX_PARAM_CHARACTERS, of_refusal, shown
from tests.serve.openai.bodies import CHAT, refused


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "null"),
        (True, "true"),
        (5, "5"),
        (10**5000, "an integer of 16610 bits"),
        (1.5, "1.5"),
        (math.nan, "no finite number"),
        ("a", "'a'"),
        ([1, 2], "a list of 2"),
        ({}, "an object"),
        ("x" * 10**6, "'" + "x" * 56 + "..."),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_was_given_is_shown_in_few_characters(given: Any, text: str) -> None:
    assert shown(given) == text


def test_a_refusal_is_told_of_the_clients_field() -> None:
    error = RequestError("logprobs is 5; no", param="logprobs", code="some_code")
    told = of_refusal(error, {"logprobs": "top_logprobs"})
    assert (told.status, told.code, told.param) == (400, "some_code", "top_logprobs")
    assert told.message == "top_logprobs: logprobs is 5; no"
    assert of_refusal(error, {}).message == error.message


def test_a_clients_own_names_do_not_make_an_error_long() -> None:
    error = refused(parse_chat, CHAT | {"logit_bias": {"\n" + "x" * 10**5: 1}})
    assert error.param is not None
    assert error.param.startswith("logit_bias.?x")
    assert len(error.param) <= MAX_PARAM_CHARACTERS
