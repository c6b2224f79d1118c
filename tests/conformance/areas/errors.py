# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mistakes of the caller: each is the client's own exception, with OpenAI's object in it, and does no harm."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.target import Target

NEEDS = ("chat", "errors")
MESSAGES: Any = [{"role": "user", "content": "one"}]
WRONG: Any = [
    {"temperature": -1},
    {"temperature": "warm"},
    {"top_p": 7},
    {"n": 0},
    {"max_tokens": -5},
    {"logit_bias": {"5": 1000}},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "nobody", "content": "one"}]},
    {"top_logprobs": 2},
    {"response_format": {"type": "xml"}},
    {"tool_choice": "always"},
]


def a_wrong_field_is_a_bad_request_that_says_what_is_wrong(target: Target) -> None:
    with target.client() as client:
        for wrong in WRONG:
            asked: Any = {"model": target.model, "messages": MESSAGES, "max_tokens": 1, **wrong}
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**asked)
            body: Any = caught.value.body
            assert body.keys() >= {"message", "type", "param", "code"}, wrong
            assert body["message"], wrong
        assert client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=1).choices


def a_wrong_stream_is_a_bad_request_before_it_begins(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=target.model, messages=MESSAGES, stream=True, temperature=-1)


def a_prompt_that_is_too_long_is_a_bad_request_with_its_code(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=target.model, messages=[{"role": "user", "content": "one two " * 500_000}], max_tokens=1
        )
    assert caught.value.code == "context_length_exceeded"


def another_model_is_not_found(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def another_route_is_not_found(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.NotFoundError):
        client.get("/no/such/route", cast_to=object)


def another_method_is_an_error_of_status_405(target: Target) -> None:
    with target.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.delete("/chat/completions", cast_to=object)
    assert caught.value.status_code == 405
    body: Any = caught.value.body
    assert body["message"]


def every_answer_has_a_request_id(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=1)
        assert answer._request_id
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=target.model, messages=MESSAGES, temperature=-1)
    assert caught.value.request_id
    assert caught.value.request_id != answer._request_id
