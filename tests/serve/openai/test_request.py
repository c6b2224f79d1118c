# SPDX-License-Identifier: MIT OR Apache-2.0
"""The order of the checks, the service's limits, and that whatever comes is a request or a short 400."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.chat_request import ChatRequest, parse_chat
from metrale_ray.serve.openai.completion_request import CompletionRequest, parse_completion
from metrale_ray.serve.openai.parameters import chat_params, completion_params
from metrale_ray.serve.openai.request import ignored_fields, unknown_fields
from tests.serve.openai.bodies import BOTH, CHAT, COMPLETION, SETTINGS, Read, refused
from tests.serve.openai.served import model

SOON_S = 1.0  # of this thread's own time
INF, NAN = math.inf, math.nan

WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (NAN, INF, -INF, -1, -1e-9, 101, 10**400, "0.7", True, [], {}),
    "top_p": (0, -0.0, 1.0000001, NAN, -1, "1", False),
    "top_k": (-2, 2**32, 1.0, 1.5, "5", True, 10**5000),
    "min_p": (-0.1, 1.1, NAN, "0"),
    "seed": (-(2**63) - 1, 2**64, 10**20, 10**5000, "7", 1.5, 7.0, True),
    "max_tokens": (-1, 1e9, 2**32, 10**20, "5", True, NAN),
    "min_tokens": (-1, 2**32, "1", 1.0),
    "presence_penalty": (1e308, -1e308, 2.1, NAN, "1"),
    "frequency_penalty": (1e308, -2.1, INF, True),
    "repetition_penalty": (0, -1, 1e308, NAN, "1"),
    "n": (0, -1, 10**6, 10**5000, 1.0, "1", True, NAN),
    "prompt_logprobs": (-1, 21, 10**6, True, "1"),
    "priority": (2**31, -(2**31) - 1, 1.0, "1"),
    "stream": (1, 0, "true", []),
}
LEGAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, -0.0, 1e-320, 1, 100),
    "top_p": (1, 1e-320, 0.5),
    "top_k": (-1, 0, 2**31),
    "seed": (0, 2**63, 2**64 - 1),
    "max_tokens": (1, 10**9, 2**31, 2**32 - 1),
    "presence_penalty": (-2, 2),
    "logit_bias": ({}, {"0": -100, "4294967295": 100.0}),
    "stop": ([], "x", ["x"] * 16, "x" * 256),
    "prompt_logprobs": (0, 20),
    "n": (1, 16),
}


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_a_number_out_of_range_or_of_another_kind_is_refused_by_name(
    read: Read, body: dict[str, Any], name: str
) -> None:
    for value in WRONG[name]:
        error = refused(read, body | {name: value})
        assert error.param == name
        assert error.message.startswith(f"{name} is ")


@BOTH
@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_value_becomes_a_legal_parameter(read: Read, body: dict[str, Any], name: str) -> None:
    for value in LEGAL[name]:
        request = read(body | {name: value}, SETTINGS)
        assert getattr(_params(request), name) == getattr(SamplingParams(**{name: value}), name)
        assert unknown_fields(request) == []


@BOTH
def test_null_is_not_given(read: Read, body: dict[str, Any]) -> None:
    request = read(body, SETTINGS)
    nulls = dict.fromkeys(name for name in type(request).model_fields if name not in body)
    assert read(body | nulls, SETTINGS) == request
    assert unknown_fields(read(body | {"never_heard_of": None}, SETTINGS)) == []


@BOTH
@pytest.mark.parametrize(
    ("more", "limit", "param"),
    [
        ({"n": 10**6}, "max_n", "n"),
        ({"stop": ["x"] * 500_000}, "max_stop_strings", "stop"),
        ({"stop": [5] * 500_000}, "max_stop_strings", "stop"),
        ({"stop": "x" * 2**20}, "max_stop_characters", "stop[0]"),
        ({"prompt_logprobs": 10**6}, "max_logprobs", "prompt_logprobs"),
        ({"logit_bias": {str(index): 1 for index in range(10**5)}}, "max_logit_biases", "logit_bias"),
        ({"guided_json": {"enum": ["x" * 64] * 1024}}, "max_schema_bytes", "guided_json"),
        ({"guided_regex": "x" * 2**17}, "max_schema_bytes", "guided_regex"),
    ],
)
def test_a_small_body_cannot_order_much_work(
    read: Read, body: dict[str, Any], more: dict[str, Any], limit: str, param: str
) -> None:
    start = time.thread_time()
    error = refused(read, body | more)
    assert time.thread_time() - start < SOON_S
    assert (error.param, error.code) == (param, "limit_exceeded")
    assert limit in error.message
    assert str(getattr(ServeLimits(), limit)) in error.message


@pytest.mark.parametrize(
    ("read", "body", "limit"),
    [
        (parse_completion, COMPLETION | {"best_of": 10**6}, "max_best_of"),
        (parse_completion, COMPLETION | {"logprobs": 10**6}, "max_logprobs"),
        (parse_completion, COMPLETION | {"prompt": ["x"] * 10_000}, "max_prompts"),
        (parse_completion, COMPLETION | {"prompt": [[1]] * 10_000}, "max_prompts"),
        (parse_chat, CHAT | {"top_logprobs": 21, "logprobs": True}, "max_logprobs"),
        (parse_chat, CHAT | {"messages": CHAT["messages"] * 5000}, "max_messages"),
        (parse_chat, CHAT | {"tools": [{}] * 129}, "max_tools"),
    ],
)
def test_each_route_has_limits_of_its_own(read: Read, body: dict[str, Any], limit: str) -> None:
    error = refused(read, body)
    assert error.code == "limit_exceeded"
    assert limit in error.message


def test_the_limits_are_the_services_own() -> None:
    narrow = ApiSettings(ServeLimits(max_n=2, max_stop_strings=1, max_stop_characters=3))
    assert parse_chat(CHAT | {"n": 2, "stop": ["abc"]}, narrow).n == 2
    for more in ({"n": 3}, {"stop": ["a", "b"]}, {"stop": "abcd"}):
        assert refused(parse_chat, CHAT | more, narrow).code == "limit_exceeded"


@pytest.mark.parametrize("body", [[], [CHAT], None, "{}", 5, True])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    assert "must be a JSON object" in refused(parse_chat, body).message


@BOTH
@pytest.mark.parametrize("extra", [0, 10**6])
def test_a_million_wrong_items_make_one_short_error_soon(read: Read, body: dict[str, Any], extra: int) -> None:
    start = time.thread_time()
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "messages", "prompt", "guided_choice"):
        if name not in body and name in ("messages", "prompt"):
            continue
        limits = ApiSettings(ServeLimits(max_messages=10**7))
        refused(read, body | {name: [None] * (1 + extra)}, limits)
    assert time.thread_time() - start < SOON_S


@BOTH
def test_unknown_fields_are_listed_and_a_strict_service_refuses_them(read: Read, body: dict[str, Any]) -> None:
    more = {"foo": 1, "bar": {}, "model_config": 1, "stream": True, "stream_options": {"baz": 1}, "copy": None}
    request = read(body | more, SETTINGS)
    assert unknown_fields(request) == ["foo", "bar", "model_config", "stream_options.baz"]
    assert request.stream is True
    error = refused(read, body | more, ApiSettings(strict=True))
    assert (error.code, error.param) == ("unknown_field", "foo")
    assert all(name in error.message for name in ("foo", "bar", "stream_options.baz"))


@BOTH
@pytest.mark.parametrize(("seed", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (-5, 2**64 - 5), (7, 7)])
def test_a_negative_seed_is_the_same_as_two_to_the_64th_more(
    read: Read, body: dict[str, Any], seed: int, used: int
) -> None:
    assert _params(read(body | {"seed": seed}, SETTINGS)).seed == used


def test_what_is_taken_without_effect_is_listed_and_no_mistake() -> None:
    more = {"verbosity": "low", "stream": True, "stream_options": {"include_obfuscation": True}, "foo": 1}
    assert ignored_fields(parse_chat(CHAT | more, SETTINGS)) == [
        "foo",
        "stream_options.include_obfuscation",
        "verbosity",
    ]
    del more["foo"]
    assert unknown_fields(parse_chat(CHAT | more, ApiSettings(strict=True))) == []
    neutral = {"verbosity": "medium", "stream": True, "stream_options": {"include_obfuscation": False}}
    assert ignored_fields(parse_chat(CHAT | neutral, SETTINGS)) == []
    for wrong in ({"verbosity": "loud"}, {"stream": True, "stream_options": {"include_obfuscation": 1}}):
        assert refused(parse_chat, CHAT | wrong).code == "unsupported_field"


def test_a_strict_service_takes_every_known_field() -> None:
    neutral = {"modalities": ["text"], "store": False, "service_tier": "auto", "echo": False, "length_penalty": 1.0}
    assert unknown_fields(parse_chat(CHAT | neutral, ApiSettings(strict=True))) == []


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_json_schema_says_that_null_is_taken_and_what_is_required(kind: type[ChatRequest]) -> None:
    schema = kind.model_json_schema()
    assert schema["required"] == [name for name in ("messages", "prompt") if name in kind.model_fields]
    for name, one in schema["properties"].items():
        assert (name in schema["required"]) != ({"type": "null"} in one["anyOf"] if "anyOf" in one else False)
    assert schema["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100.0}
    json.dumps(schema, allow_nan=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["auto", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def _bodies(kind: type[Any], base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.dictionaries(st.sampled_from(sorted(kind.model_fields)), VALUES, max_size=4)
    return fields.map(lambda fields: base | fields)


@pytest.mark.parametrize(
    ("kind", "read", "base"), [(ChatRequest, parse_chat, CHAT), (CompletionRequest, parse_completion, COMPLETION)]
)
def test_whatever_comes_is_a_400_or_a_request_with_legal_parameters_that_the_json_schema_allows(
    kind: type[Any], read: Read, base: dict[str, Any], scale: int
) -> None:
    document = Draft202012Validator(kind.model_json_schema())

    @settings(max_examples=75 * scale)
    @given(_bodies(kind, base))
    def check(body: dict[str, Any]) -> None:
        result = _read_or_error(read, body)
        if isinstance(result, ApiError):
            json.dumps(result.body(), allow_nan=False)
            assert result.status == 400
        else:
            assert document.is_valid(body | {"messages": CHAT["messages"]})  # others read what is in a message

    check()


def _params(request: Any) -> SamplingParams:
    return chat_params(request, model()) if isinstance(request, ChatRequest) else completion_params(request, model())


def _read_or_error(read: Read, body: object) -> SamplingParams | ApiError:
    try:
        return _params(read(body, SETTINGS))
    except ApiError as error:
        return error
