# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of tools in the text of an answer: the same calls however the text is cut, in every family's form."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.parsing.names import TOOL_PARSERS
from tests.serve.parsing.reading import Answer, all_cuts, parser_of, read
from tests.serve.parsing.texts import TEXTS
from tests.serve.pieces import cut

CASES = [(family, text, expected) for family in TOOL_PARSERS for text, expected in TEXTS[family]]
FAMILIES = st.sampled_from(TOOL_PARSERS)
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *('{"name": "f"', '"arguments": ', '"parameters":', '{"name":"now","arguments":{', "{}", '{"a":1}', '"f"'),
    *("{", "}", "[", "]", ",", ":", ";", '"', "\\", " ", "\n", "f", "1", "null", "<", "</", "<think>", "</think>", "é"),
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_a_text_gives_its_content_and_calls_whole_or_cut_once_anywhere_or_everywhere(
    family: str, text: str, expected: Answer
) -> None:
    assert read(parser_of(family), [text]) == expected
    assert read(parser_of(family), list(text)) == expected
    for parts in all_cuts(text, 1):
        assert read(parser_of(family), parts) == expected


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_every_cut_into_three_parts_gives_the_same(family: str, scale: int) -> None:
    for text, expected in TEXTS[family]:
        if len(text) <= 32 or scale > 1:
            for parts in all_cuts(text, 2):
                assert read(parser_of(family), parts) == expected, parts


@given(
    family=FAMILIES,
    text=ANSWERS,
    cuts=st.lists(st.integers(0, 120), max_size=8),
    reasoning=st.booleans(),
    is_open=st.booleans(),
)
def test_what_a_text_gives_does_not_depend_on_its_cuts(
    family: str, text: str, cuts: list[int], reasoning: bool, is_open: bool
) -> None:
    name = "think" if reasoning else None
    whole = read(parser_of(family, name, is_open=is_open), [text])
    assert read(parser_of(family, name, is_open=is_open), cut(text, cuts)) == whole
    assert read(parser_of(family, name, is_open=is_open), list(text)) == whole
    if not reasoning and not whole.calls:
        assert whole.content == text  # nothing is lost, and nothing is made up
    if whole.has_calls:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_a_text_that_is_cut_off_has_the_beginning_of_its_calls(family: str, text: str, expected: Answer) -> None:
    for end in range(len(text)):
        answer = read(parser_of(family), [text[:end]])
        for (name, arguments), (whole_name, whole) in zip(answer.calls, expected.calls, strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        assert len(answer.calls) <= len(expected.calls)
        num_whole = sum(one == other for one, other in zip(answer.calls, expected.calls, strict=False))
        assert answer.has_cut_call or num_whole == len(answer.calls)
        assert not (answer.has_cut_call and answer.has_calls)
        if answer.has_calls:
            assert answer.calls == expected.calls[: len(answer.calls)]


@pytest.mark.parametrize(("family", "end"), [("hermes", "</tool_call>"), ("mistral", "]"), ("llama3_json", "")])
def test_a_call_is_whole_with_its_last_bracket_and_not_before(family: str, end: str) -> None:
    text = next(text for text, expected in TEXTS[family] if expected.calls == [("f", '{"a": 1}')])
    last = text.rindex("}") + 1
    assert [read(parser_of(family), [text[:place]]).has_calls for place in (last - 1, last)] == [False, True]
    assert text[last:].strip() == end


WORDS = st.sampled_from(["", "x", " y\n", "é", "a < b [c] {d}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", '{"name": "f"}', "<|python_tag|>", '"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=3,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "now"]), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def written(family: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    """Calls as the family writes them."""
    key = "parameters" if family == "llama3_json" else "arguments"
    each = [json.dumps({"name": name, key: arguments}, indent=indent) for name, arguments in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
    return f"[TOOL_CALLS] [{', '.join(each)}]" if family == "mistral" else f"<|python_tag|>{'; '.join(each)}"


@given(
    family=FAMILIES,
    calls=CALLS,
    before=WORDS,
    indent=st.sampled_from([None, 2]),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_calls_are_read_as_they_were_written(
    family: str, calls: list[tuple[str, dict[str, Any]]], before: str, indent: int | None, cuts: list[int]
) -> None:
    answer = read(parser_of(family), cut(before + written(family, calls, indent), cuts))
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
    assert answer.has_calls
    assert answer.content == before.rstrip()


def test_arguments_come_with_the_text_that_they_are_in() -> None:
    parser = parser_of("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    assert [parser.push(word).calls[0].arguments for word in ("one ", "two", '"}')] == ["one ", "two", '"}']
    assert parser.push("}").calls == ()


@pytest.mark.parametrize(
    ("family", "begin", "more"),
    [
        ("hermes", "", "<tool_call"),
        ("hermes", "", "<tool_call>\n"),
        ("hermes", "", "<tool_call>{"),
        ("hermes", "<tool_call>", " "),
        ("hermes", '<tool_call>{"name": "', "<tool_call>{"),
        ("hermes", '<tool_call>{"arguments": ', "["),
        ("hermes", '<tool_call>{"x": ', "1"),
        ("mistral", "", "[TOOL_CALLS] ["),
        ("mistral", "", "[TOOL_CALLS]f[ARGS"),
        ("mistral", "[TOOL_CALLS]", "a"),
        ("llama3_json", '{"', "name"),
        ("llama3_json", "", "<|python_tag|>{"),
    ],
)
def test_almost_a_call_takes_time_in_proportion_to_its_length_and_is_content(
    family: str, begin: str, more: str
) -> None:
    def steps(num_characters: int) -> int:
        text = begin + more * (num_characters // len(more))
        parser = parser_of(family)
        count, content = _count_calls(parser, text)
        assert content == text
        return count

    assert steps(3000) < 2.2 * steps(1500)


def _count_calls(parser: Any, text: str) -> tuple[int, str]:
    """Functions called while a text is read character by character, and its content."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        content = [parser.push(character).content for character in text]
        content.append(parser.flush().content)
    finally:
        sys.setprofile(None)
    return count, "".join(content)


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_a_long_near_miss_at_once_is_content(family: str) -> None:
    for text in ("<tool_call>{" * 8_000, "[TOOL_CALLS]f[" * 8_000, '{"name": ' * 8_000, "[" * 90_000):
        assert read(parser_of(family), [text]) == Answer(text)
