# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages as clients write them become the ones that templates read, or are refused with their place."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.serve import messages as messages_module
from metrale_ray.serve.messages import (
    LONG_CHARACTERS,
    LONG_MESSAGES,
    MAX_CALLS,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    ROLES,
    normal_messages,
    normal_messages_apart,
)

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2.5, null]}'}}


def one(message: Any) -> dict[str, Any]:
    return normal_messages([HELLO, message], 10)[1]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("content", "expected"),
    [("x", "x"), ("", ""), ([], ""), ([text("a")], "a"), ([text("a "), text(""), text("\nb")], "a \nb"), (["a"], "a")],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_content_becomes_a_text_in_every_role(role: str, content: Any, expected: str) -> None:
    assert one({"role": role, "content": content}) == {"role": ROLES[role], "content": expected}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"refusal": "No."}, "No."),
        ({"content": "x", "refusal": None}, "x"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ],
)
def test_an_answer_may_have_no_content(more: dict[str, Any], expected: str) -> None:
    assert one({"role": "assistant", **more}) == {"role": "assistant", "content": expected}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_the_names_that_templates_read(key: str) -> None:
    found = one({"role": "assistant", "content": "4", key: "sums"})
    assert found == {"role": "assistant", "content": "4", "reasoning_content": "sums", "thinking": "sums"}
    assert "reasoning_content" not in one({"role": "user", "content": "4", key: "sums"})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), (" {} ", {})],
)
def test_arguments_of_calls_become_objects(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": arguments}}
    found = one({"role": "assistant", "tool_calls": [call]})
    assert found["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}},
    ]


def test_a_tools_answer_names_a_call_before_it() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    answers = [{"role": "tool", "tool_call_id": name, "content": [text("1")], "name": "f"} for name in ("c2", "c1")]
    found = normal_messages([HELLO, calls, *answers], 10)
    assert found[2:] == [{"role": "tool", "content": "1", "name": "f", "tool_call_id": name} for name in ("c2", "c1")]
    with pytest.raises(RequestError, match=r"messages\[0\].tool_call_id is 'c2'; it must be the id of a call in"):
        normal_messages([answers[0], calls], 10)


def test_what_has_no_value_or_that_no_template_reads_is_left_out() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "annotations": [1], "name": None, "audio": None}
    assert one(message) == {"role": "assistant", "content": "x"}
    assert one({**HELLO, "name": "Ann", "tool_calls": [CALL]}) == {**HELLO, "name": "Ann"}


USER: dict[str, Any] = {"role": "user"}
ASSISTANT: dict[str, Any] = {"role": "assistant"}


@pytest.mark.parametrize(
    ("message", "place", "words"),
    [
        (3, "", "is 3; it must be an object"),
        (None, "", "is missing or null"),
        ({"content": "x"}, ".role", "is missing or null; it must be one of system, developer, user, assistant, tool"),
        ({"role": "function", "content": "x"}, ".role", "is 'function'"),
        ({"role": ["user"], "content": "x"}, ".role", "is ['user']"),
        (USER, ".content", "is missing or null; it must be a text, or a list of parts"),
        ({"role": "system", "content": None}, ".content", "is missing or null"),
        ({**USER, "content": 5}, ".content", "is 5"),
        ({**USER, "content": {"type": "text", "text": "x"}}, ".content", "is {"),
        ({**USER, "content": [{"type": "image_url", "image_url": {}}]}, ".content[0].type", "is 'image_url'"),
        ({**USER, "content": [text("x"), {"type": "input_audio"}]}, ".content[1].type", "Only text is supported"),
        ({**USER, "content": [{"type": "refusal", "refusal": "x"}]}, ".content[0].type", "it must be 'text'"),
        ({**USER, "content": [{"type": ["text"]}]}, ".content[0].type", "is ['text']"),
        ({**USER, "content": [{"text": "x"}]}, ".content[0].type", "is missing or null"),
        ({**USER, "content": [{"type": "text"}]}, ".content[0].text", "is missing or null"),
        ({**USER, "content": [{"type": "text", "text": 1}]}, ".content[0].text", "is 1"),
        ({**USER, "content": [5]}, ".content[0]", "is 5"),
        ({**USER, "content": [text("x")] * (MAX_PARTS + 1)}, ".content", f"at most {MAX_PARTS} are allowed"),
        ({**HELLO, "name": 5}, ".name", "is 5"),
        ({**HELLO, "name": "x" * (MAX_NAME_CHARACTERS + 1)}, ".name", f"1 to {MAX_NAME_CHARACTERS} characters"),
        ({**ASSISTANT, "refusal": 5}, ".refusal", "is 5"),
        ({**ASSISTANT, "reasoning_content": ["x"]}, ".reasoning_content", "is ['x']"),
        ({**ASSISTANT, "function_call": {"name": "f"}}, ".function_call", "use tool_calls"),
        ({**ASSISTANT, "audio": {"id": "x"}}, ".audio", "is not supported"),
        ({**ASSISTANT, "tool_calls": "x"}, ".tool_calls", "it must be a list of calls"),
        ({**ASSISTANT, "tool_calls": [CALL] * (MAX_CALLS + 1)}, ".tool_calls", f"at most {MAX_CALLS} are allowed"),
        ({**ASSISTANT, "tool_calls": [1]}, ".tool_calls[0]", "is 1"),
        ({**ASSISTANT, "tool_calls": [{**CALL, "type": "custom"}]}, ".tool_calls[0].type", "is 'custom'"),
        ({**ASSISTANT, "tool_calls": [{**CALL, "id": None}]}, ".tool_calls[0].id", "is missing or null"),
        ({**ASSISTANT, "tool_calls": [CALL, {"id": "x"}]}, ".tool_calls[1].function", "is missing or null"),
        ({"role": "tool", "content": "x"}, ".tool_call_id", "is missing or null"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, ".tool_call_id", "is ''"),
        ({"role": "tool", "content": "x", "tool_call_id": ["c"]}, ".tool_call_id", "is ['c']"),
        ({"role": "tool", "tool_call_id": "c"}, ".content", "is missing or null"),
    ],
)
def test_what_no_template_can_be_given_is_refused_with_its_place(message: Any, place: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        one(message)
    assert caught.value.param == f"messages[1]{place}"
    assert caught.value.message.startswith(f"messages[1]{place} ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "is no JSON"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ("[" * 60_000, "is no JSON: maximum recursion depth"),
        ("9" * 5000, "is no JSON: Exceeds the limit"),
        ("[1]", r"is [1]; it must be a text that is a JSON object"),
        ("null", "it must be a text that is a JSON object"),
        (5, "is 5"),
        ([1], "is [1]"),
    ],
    ids=range(8),
)
def test_arguments_that_are_no_json_object_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        one({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]})
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert words in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("name", [None, "", 5, "x" * (MAX_NAME_CHARACTERS + 1)])
def test_a_called_functions_name_is_a_short_text(name: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\].function.name is"):
        one({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": name}}]})


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is missing or null"),
        ("Hello", "messages is 'Hello'; it must be a list"),
        ({"role": "user"}, "it must be a list"),
        ([], "messages is empty"),
        ([HELLO] * 11, "messages has 11 entries; at most 10 are allowed"),
    ],
)
def test_a_list_that_is_none_is_empty_or_is_too_long_is_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        normal_messages(messages, 10)
    assert caught.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "id", "function", "name", "arguments", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
KEYS = ["content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "function_call", "audio"]
MESSAGES = st.lists(
    st.builds(
        lambda role, more: {"role": role, **more},
        st.sampled_from(sorted(ROLES)),
        st.dictionaries(st.sampled_from(KEYS), JSON | st.just([CALL]) | st.text(max_size=3), max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(MESSAGES)
def test_whatever_comes_is_made_normal_or_refused_and_what_is_normal_stays(messages: list[dict[str, Any]]) -> None:
    try:
        found = normal_messages(messages, 10)
    except RequestError as error:
        assert str(error.param).startswith("messages")  # noqa: PT017  # either is right, a refusal without a place is not
        return
    assert len(found) == len(messages)
    for message in found:
        assert message["role"] in ROLES.values()
        assert isinstance(message["content"], str)
        assert None not in message.values()
    json.dumps(found)
    assert normal_messages(found, 10) == found


def test_arguments_of_more_keys_than_a_body_may_have_are_refused_before_they_are_parsed() -> None:
    for num_calls, num_keys in ((1, 300_000), (100, 3000)):
        arguments = "{" + ",".join(f'"{number}":1' for number in range(num_keys)) + "}"
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        began_s = time.thread_time()
        with pytest.raises(RequestError, match="at most") as caught:
            one({"role": "assistant", "tool_calls": [call] * num_calls})
        assert caught.value.param == "messages"
        assert time.thread_time() - began_s < 0.1


LONG_CALL = {**CALL, "function": {"name": "f", "arguments": json.dumps({"a": "x" * LONG_CHARACTERS})}}


@pytest.mark.parametrize(
    ("messages", "is_apart"),
    [
        ([HELLO], False),
        ([{"role": "user", "content": "x" * 10**6}], False),
        ([{"role": "user", "content": ["a"]}, {"role": "assistant", "tool_calls": [CALL]}], False),
        ([HELLO] * (LONG_MESSAGES + 1), True),
        ([{"role": "user", "content": ["a"] * (LONG_MESSAGES + 1)}], True),
        ([{"role": "user", "content": ["a"] * LONG_MESSAGES}] * 2, True),
        ([{"role": "assistant", "tool_calls": [LONG_CALL]}], True),
    ],
)
def test_long_conversations_are_made_normal_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, messages: list[Any], is_apart: bool
) -> None:
    threads: list[threading.Thread] = []

    def noted(given: object, most: int) -> list[dict[str, Any]]:
        threads.append(threading.current_thread())
        return normal_messages(given, most)

    monkeypatch.setattr(messages_module, "normal_messages", noted)
    assert asyncio.run(normal_messages_apart(messages, 1000)) == normal_messages(messages, 1000)
    assert [thread is not threading.current_thread() for thread in threads] == [is_apart]


@pytest.mark.parametrize("message", [None, 5, "x", {"content": [None, 5]}, {"tool_calls": [{"function": 5}]}])
def test_what_is_no_message_is_refused_apart_as_well(message: Any) -> None:
    with pytest.raises(RequestError):
        asyncio.run(normal_messages_apart([message], 10))
