# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests, the model's defaults and the engine's become one set of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.backend import GenerationDefaults
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.completion_request import parse_completion
from metrale_ray.serve.openai.parameters import chat_params, completion_params, told_to
from tests.serve.openai.bodies import CHAT, COMPLETION, SETTINGS, TOOL
from tests.serve.openai.served import model

DEFAULTS = GenerationDefaults(0.6, 0.9, 20, 0.1, 1.1, 50)


def of_chat(defaults: GenerationDefaults | None = None, **more: Any) -> SamplingParams:
    """The parameters of a chat."""
    return chat_params(parse_chat(CHAT | more, SETTINGS), model(defaults))


def of_completion(defaults: GenerationDefaults | None = None, **more: Any) -> SamplingParams:
    """The parameters of a completion."""
    return completion_params(parse_completion(COMPLETION | more, SETTINGS), model(defaults))


def test_a_plain_request_has_the_engines_defaults() -> None:
    assert of_chat() == SamplingParams(max_tokens=None)
    assert of_completion() == SamplingParams(max_tokens=16)


def test_the_models_defaults_stand_where_the_request_says_nothing() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert of_chat(DEFAULTS) == SamplingParams(**own, max_tokens=50)
    assert of_completion(DEFAULTS) == SamplingParams(**own, max_tokens=16)
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 7}
    assert of_chat(DEFAULTS, **given) == of_completion(DEFAULTS, **given) == SamplingParams(**given)


def test_every_other_field_goes_through() -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"3": 2.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
    }
    assert of_chat(**fields) == of_completion(**fields) == SamplingParams(**fields)


def test_a_chats_log_probabilities_are_asked_for_by_a_flag() -> None:
    assert of_chat(logprobs=True).logprobs == 0
    assert of_chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert of_chat(logprobs=False, top_logprobs=0).logprobs is None


def test_an_echo_has_the_log_probabilities_of_the_answer() -> None:
    assert of_completion(echo=True).prompt_logprobs is None
    assert of_completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert of_completion(echo=True, logprobs=3, prompt_logprobs=5).prompt_logprobs == 5
    assert of_completion(logprobs=3).prompt_logprobs is None


def test_the_best_are_chosen_by_log_probabilities() -> None:
    best = of_completion(n=2, best_of=5)
    assert (best.n, best.logprobs) == (5, 0)
    assert of_completion(n=2, best_of=5, logprobs=4).logprobs == 4
    assert of_completion(n=2, best_of=2).logprobs is None


def test_no_tokens_are_one_for_the_engine() -> None:
    assert of_completion(max_tokens=0, echo=True).max_tokens == 1
    assert of_chat(max_completion_tokens=0, prompt_logprobs=1).max_tokens == 1


def test_the_output_has_the_form_that_the_request_or_a_tool_demands() -> None:
    json_object = {"response_format": {"type": "json_object"}}
    assert of_completion(**json_object).structured_outputs == StructuredOutputs(json_object=True)
    request, served = parse_chat(CHAT | json_object, SETTINGS), model()
    outputs = chat_params(request, served, after="</think>").structured_outputs
    assert outputs == StructuredOutputs(json_object=True, after="</think>")
    call = StructuredOutputs(grammar='start: "call"')
    demanding = parse_chat(CHAT | {"tools": [TOOL], "tool_choice": "required"}, SETTINGS)
    params = chat_params(demanding, served, tool_outputs=call, keep_special_tokens=True)
    assert params.structured_outputs == call
    assert params.skip_special_tokens is False


@pytest.mark.parametrize(
    ("more", "name", "param"),
    [
        ({}, "max_tokens", "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ({}, "prompt_token_ids", "messages"),
        ({}, "prompt", "messages"),
        ({}, "logprobs", "top_logprobs"),
        ({}, "logit_bias", "logit_bias"),
        ({"guided_regex": "a"}, "structured_outputs", "guided_regex"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ],
)
def test_the_engines_refusals_speak_of_the_clients_fields(more: dict[str, Any], name: str, param: str) -> None:
    error = told_to(parse_chat(CHAT | more, SETTINGS), RequestError(f"{name} is wrong", param=name))
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, param)
    assert f"{name} is wrong" in error.message


def test_a_completions_prompt_is_the_clients_prompt() -> None:
    request = parse_completion(COMPLETION, SETTINGS)
    error = told_to(request, RequestError("no", code="context_length_exceeded", param="prompt_token_ids"))
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
