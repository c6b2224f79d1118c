# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a chat's body may hold, and which of its fields do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.chat_request import ChatRequest, parse_chat
from tests.serve.openai.bodies import CHAT, SETTINGS, TOOL, refused

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
NAMED = {"type": "function", "function": {"name": "look"}}


def chat(**more: Any) -> ChatRequest:
    """A chat with these fields besides."""
    return parse_chat(CHAT | more, SETTINGS)


def test_a_plain_chat_has_the_defaults() -> None:
    request = chat()
    assert request.messages == CHAT["messages"]
    assert (request.n, request.stream, request.logprobs, request.most_tokens) == (1, False, False, ("max_tokens", None))
    assert (request.choice_of_tools, request.opens_answer, request.template_variables) == ("none", True, {})
    assert not request.include_usage


def test_what_the_openai_clients_send_is_taken() -> None:
    request = chat(
        tools=[{**TOOL, "function": {**TOOL["function"], "strict": True, "description": "Looks."}}],
        tool_choice="auto",
        parallel_tool_calls=False,
        response_format=SCHEMA,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=5,
        reasoning_effort="low",
        metadata={"a": "b"},
        user="someone",
        logprobs=True,
        top_logprobs=3,
    )
    assert request.most_tokens == ("max_completion_tokens", 5)
    assert request.include_usage
    assert request.continuous_usage_stats
    assert request.template_variables == {"reasoning_effort": "low"}
    assert request.choice_of_tools == "auto"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"n_probs": 3}, "n_probs"),
        ({"echo": True}, "echo"),
        ({"best_of": 10**6}, "best_of"),
        ({"prompt": "x"}, "prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_a_known_field_that_is_not_supported_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    error = refused(parse_chat, CHAT | more)
    assert (error.param, error.code) == (param, "unsupported_field")
    assert error.message.startswith(f"{param} is not supported. ")


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "must be a list"),
        ({"messages": [CHAT["messages"][0], "hi"]}, "messages[1]", "must be an object"),
        ({"model": 5}, "model", "must be a string"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs: true"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at least 0"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one of them"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "max_completion_tokens is 5"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "true or false"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "'low'"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a", None]}, "stop[1]", "must be a string"),
        ({"bad_words": [""]}, "bad_words[0]", ""),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "no tools"),
    ],
)
def test_what_is_wrong_is_told_of_its_field(more: dict[str, Any], param: str, words: str) -> None:
    error = refused(parse_chat, CHAT | more)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_demanded_wins_over_a_form(choice: Any) -> None:
    assert chat(tools=[TOOL], tool_choice=choice, response_format=SCHEMA).form is None
    for free in ("auto", "none", None):
        form = chat(tools=[TOOL], tool_choice=free, response_format=SCHEMA).form
        assert form is not None
        assert form.param == "response_format.json_schema.schema"


def test_a_template_comes_from_a_request_only_where_it_is_allowed() -> None:
    allowing = ApiSettings(allow_request_templates=True)
    assert refused(parse_chat, CHAT | {"chat_template": "{{ x }}"}).param == "chat_template"
    assert parse_chat(CHAT | {"chat_template": "{{ x }}"}, allowing).chat_template == "{{ x }}"
    hidden = CHAT | {"chat_template_kwargs": {"chat_template": "{{ x }}"}}
    assert refused(parse_chat, hidden).param == "chat_template_kwargs"
    assert refused(parse_chat, hidden, allowing).param == "chat_template_kwargs"


def test_variables_of_the_template_come_from_the_request() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "x"}])
    assert request.template_variables == {"documents": [{"text": "x"}], "enable_thinking": False}
    assert chat(continue_final_message=True).opens_answer is False
    assert chat(add_generation_prompt=False).opens_answer is False


def test_no_tokens_are_for_prompt_logprobs_alone() -> None:
    assert chat(max_tokens=0, prompt_logprobs=1).most_tokens == ("max_tokens", 0)
    assert chat(max_tokens=5, max_completion_tokens=5).most_tokens == ("max_completion_tokens", 5)
