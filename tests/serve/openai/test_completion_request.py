# SPDX-License-Identifier: MIT OR Apache-2.0
"""The forms of a prompt, and which fields of a completion do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.completion_request import MAX_TOKEN_IDS, completion_prompts, parse_completion
from tests.serve.openai.bodies import COMPLETION, SETTINGS, refused


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([""], [""]),
        ([1, 2], [[1, 2]]),
        ([0], [[0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([4294967295], [[4294967295]]),
        (list(range(5000)), [list(range(5000))]),
    ],
)
def test_a_prompt_is_one_or_many(prompt: Any, prompts: list[Any]) -> None:
    request = parse_completion(COMPLETION | {"prompt": prompt}, SETTINGS)
    assert completion_prompts(request, SETTINGS) == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], ["a", []]])
def test_no_prompt_and_no_ids_are_refused(prompt: Any) -> None:
    error = refused(parse_completion, COMPLETION | {"prompt": prompt})
    assert (error.param, error.code) == ("prompt", "empty_prompt")


@pytest.mark.parametrize(
    "prompt",
    [
        *[None, 5, True, {}, [None], ["a", 1], ["a", None], [{}], [[["a"]]], [["a"]], [[1, "a"]], [[True]]],
        *[[1, "a"], [1, True], [True], [1.0], [1.5, 2], [-1], [[0], [-1]], [2**32], [2**63], [2**70], [10**5000]],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    assert refused(parse_completion, COMPLETION | {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"best_of": 1, "n": 2}, "best_of", "at least n, which is 2"),
        ({"best_of": 0}, "best_of", "at least 1"),
        ({"best_of": 2, "stream": True}, "best_of", "a stream cannot"),
        ({"logprobs": True}, "logprobs", "an integer"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
        ({"max_tokens": 0}, "max_tokens", "unless echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "max_tokens is 0"),
        ({"echo": 1}, "echo", "true or false"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"messages": []}, "messages", "chat/completions"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "max_tokens"),
        ({"tools": [{}]}, "tools", "chats"),
    ],
)
def test_what_is_wrong_is_told_of_its_field(more: dict[str, Any], param: str, words: str) -> None:
    error = refused(parse_completion, COMPLETION | more)
    assert error.param == param
    assert words in error.message


def test_best_of_is_what_is_generated() -> None:
    assert parse_completion(COMPLETION | {"n": 2}, SETTINGS).num_generated == 2
    assert parse_completion(COMPLETION | {"n": 2, "best_of": 5}, SETTINGS).num_generated == 5
    assert parse_completion(COMPLETION | {"n": 2, "best_of": 2, "stream": True}, SETTINGS).num_generated == 2


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_tokens_ask_about_the_prompt(more: dict[str, Any]) -> None:
    assert parse_completion(COMPLETION | {"max_tokens": 0, **more}, SETTINGS).generates_nothing


def test_the_number_of_prompts_is_the_services_own() -> None:
    narrow = ApiSettings(ServeLimits(max_prompts=2))
    assert parse_completion(COMPLETION | {"prompt": [1, 2, 3]}, narrow).prompt == [1, 2, 3]
    assert refused(parse_completion, COMPLETION | {"prompt": ["a", "b", "c"]}, narrow).code == "limit_exceeded"


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([0] * (MAX_TOKEN_IDS + 1), "context_length_exceeded"), ([[0] * (MAX_TOKEN_IDS // 2 + 1)] * 2, "limit_exceeded")],
    ids=["one", "two"],
)
def test_more_ids_than_any_model_takes_are_not_looked_at(prompt: Any, code: str) -> None:
    assert refused(parse_completion, COMPLETION | {"prompt": prompt}).code == code
