# SPDX-License-Identifier: MIT OR Apache-2.0
"""One JSON value in pieces: it ends where `json` says so, and gives the text that it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.parsing.json_value import MAX_DEPTH, JsonValue
from tests.serve.pieces import cut

TOKENS = [
    *('"a"', '"', "\\", "\\u00e9", "\\u0", "\\x", "\n", "\x00", " ", "1", "-", "0", ".5", "e+1", "true", "nul", "null"),
    *("{", "}", "[", "]", ":", ",", '{"a":', "NaN", "Infinity", "é", "/", "//"),
]


def read(parts: list[str]) -> tuple[JsonValue, str, int]:
    """The reader after these parts, the text that it gave, and how many characters it took."""
    value, given_text, taken = JsonValue(), "", 0
    for part in parts:
        taken += value.push(part, 0)
        given_text += value.drain()
    return value, given_text, taken


def is_json(text: str) -> bool:
    """Whether it is one value from its first character to its last, but for control characters within strings."""
    if text != text.strip(" \t\r\n"):
        return False
    try:
        json.loads(text, strict=False, parse_constant=_refused)
    except ValueError:
        return False
    return True


def _refused(name: str) -> Any:
    raise ValueError(name)


@given(tokens=st.lists(st.sampled_from(TOKENS), max_size=10), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_a_text_is_a_value_where_json_says_so_however_it_is_cut(tokens: list[str], cuts: list[int]) -> None:
    text = "".join(tokens)
    value, given_text, taken = read(cut(text + " ", cuts))  # a number ends where something else begins
    assert (value.is_done and taken == len(text)) == is_json(text)
    if value.is_done:
        assert json.loads(given_text) == json.loads(text[:taken], strict=False)
    again, same_text, same_taken = read(list(text + " "))
    assert (again.is_done, again.is_broken, same_text, same_taken) == (
        value.is_done,
        value.is_broken,
        given_text,
        taken,
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 80), max_size=5))
def test_a_value_is_given_as_it_is_and_ends_with_its_last_character(
    written: Any, indent: int | None, is_ascii: bool, cuts: list[int]
) -> None:
    text = json.dumps(written, indent=indent, ensure_ascii=is_ascii)
    value, given_text, taken = read(cut(text + "}", cuts))
    assert (value.is_done, given_text, taken) == (True, text, len(text))
    assert not any(read([text[:end]])[0].is_done for end in range(len(text)))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a" 1}', '{"a" '),
        ("[1,]", "[1,"),
        ("[01]", "[01"),
        ("[1.]", "[1."),
        ("[-]", "[-"),
        ("{,", "{"),
        ('{"a":1,}', '{"a":1,'),
        ("[}", "["),
        ("[1}", "[1"),
        ('"\\q"', '"\\'),
        ('"\\u12g4"', '"\\u12'),
        ("trie", "tr"),
        ("NaN", ""),
        ("'a'", ""),
    ],
)
def test_it_breaks_at_the_very_character_that_no_json_has(text: str, good: str) -> None:
    value, given_text, taken = read([text])
    assert (value.is_broken, value.is_done, given_text, taken) == (True, False, good, len(good))
    assert value.push("1", 0) == 0  # nothing more is read


def test_control_characters_within_strings_are_escaped() -> None:
    assert read(['{"a\n": "\t\x00"}'])[1] == '{"a\\n": "\\t\\u0000"}'


def test_a_value_may_be_as_deep_as_parsers_read_and_no_deeper() -> None:
    assert read(["[" * MAX_DEPTH + "]" * MAX_DEPTH])[0].is_done
    value, _, taken = read(["[" * (MAX_DEPTH + 1)])
    assert (value.is_broken, taken) == (True, MAX_DEPTH)
