# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import contextlib
import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.json_text import MAX_MESSAGE_CHARACTERS, parse_object
from metrale_ray.serve.json_bounds import MAX_CONTAINERS, MAX_KEYS, MAX_TEXTS
from metrale_ray.serve.limits import ServeLimits

DEPTH = 100
TEXTS = st.text(max_size=4)  # one strategy for all: making several takes a second each
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def refusal(data: bytes, max_depth: int = DEPTH) -> str:
    began_s = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse_object(data, max_depth)
    assert time.thread_time() - began_s < 2
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < MAX_MESSAGE_CHARACTERS + 100
    caught.value.message.encode()
    return caught.value.message


@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_every_object_comes_back_as_it_is(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode(), DEPTH) == value
    assert parse_object(json.dumps(value, ensure_ascii=False, indent=1).encode(), DEPTH) == value


@given(st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        value = parse_object(data, DEPTH)
    except ApiError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    assert isinstance(value, dict)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (rb'{"a": "\ud83d"}', "hex escape"),
        (rb'{"a": "x \ude00 y"}', "surrogate"),
        (rb'{"\ud83d": 1}', "hex escape"),
        (b'{"a": "\xed\xa0\xbd"}', "unicode"),
        (b'{"a": "\xff"}', "unicode"),
        ('{"a": 1}'.encode("utf-16"), "line 1"),
        ('{"a": 1}'.encode("utf-8-sig"), "line 1"),
        (b'{"a": 1, "a": 2}', "uplicate key"),
        (b'{"o": {"a": 1, "b": [], "a": 2}}', "uplicate key"),
        (b'{"a": NaN}', "line 1"),
        (b'{"a": -Infinity}', "line 1"),
        (b'{"a": 1e400}', "too large"),
        (b'{"a": [[{"b": -1E+999}]]}', "too large"),
        (b'{"a": ' + b"9" * 400 + b".0}", "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a": "\x00"}', "control character"),
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"{} {}", "trailing"),
        (b"[]", "a list"),
        (b'"text"', "a text"),
        (b"1", "a number"),
        (b"null", "null"),
        (b"true", "true or false"),
        (b"[" * 3000, "recursion"),
        (b'{"tools": ' + b"[" * 3000, "recursion"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "recursion"),
        (b'{"' + b"k" * 100_000 + b'": 1, "' + b"k" * 100_000 + b'": 2}', "uplicate key"),
        (b'{"a": [' + b"{}," * MAX_CONTAINERS + b"1]}", "lists and objects"),
    ],
)
def test_what_is_no_safe_object_is_refused_with_its_reason(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_the_limit_of_depth_is_exact_and_counts_lists_and_objects() -> None:
    for depth in (1, 2, 7, 100):
        data = b'{"a": ' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"
        parse_object(data, depth)
        if depth > 1:
            assert f"more than {depth - 1} deep" in refusal(data, depth - 1)


def test_brackets_in_texts_count_for_no_depth() -> None:
    assert parse_object(json.dumps({"a": "[{" * 5000}).encode(), 1) == {"a": "[{" * 5000}


def test_brackets_in_texts_count_for_no_containers() -> None:
    for text in ("[" * MAX_CONTAINERS, '\\"[' * MAX_CONTAINERS, '\n{"\\' * MAX_CONTAINERS):
        assert parse_object(json.dumps({"a": text, "b": [[]]}).encode(), 3) == {"a": text, "b": [[]]}
    assert "EOF" in refusal(b'{"a": "' + b"[" * 2 * MAX_CONTAINERS)


def test_a_null_character_and_large_numbers_that_are_finite_are_taken() -> None:
    assert parse_object(rb'{"a": "\u0000", "b": 1e308, "c": 1e-320, "d": "1e999"}', DEPTH) == {
        "a": "\x00",
        "b": 1e308,
        "c": 1e-320,
        "d": "1e999",
    }


@pytest.mark.parametrize("item", [b"1,", b"1.5,", b"[],", b'{"a":1},', rb'"\u00e9",'])
def test_the_largest_bodies_take_a_bounded_time(item: bytes) -> None:
    is_container = item[:1] in (b"[", b"{")
    num_items = min(MAX_CONTAINERS - 2, MAX_KEYS - 1) if is_container else ServeLimits().max_body_bytes // len(item) - 8
    num_items = min(num_items, MAX_TEXTS - 1) if b'"' in item else num_items
    data = b'{"a": [' + item * num_items + b"1]}"
    began_s = time.thread_time()
    assert len(parse_object(data, DEPTH)["a"]) == num_items + 1
    assert time.thread_time() - began_s < 0.5  # less than half of it in one call


def test_what_would_hold_up_all_threads_is_refused_before_it_is_parsed() -> None:
    keys = b",".join(b'"%x":1' % number for number in range(600_000))
    for data in (b"{%s}" % keys, b'{"a": {%s}}' % keys, b'{"a": [%s1]}' % (b'"b",' * 600_000)):
        began_s = time.thread_time()
        assert "at most" in refusal(data)
        assert time.thread_time() - began_s < 0.2  # 0.02 s; parsing takes a second


def test_parsing_does_not_look_for_garbage_on_the_way_and_leaves_the_collector_as_it_was() -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    was_on = gc.isenabled()
    gc.callbacks.append(note)
    try:
        for is_on in (True, False):
            gc.enable() if is_on else gc.disable()
            for data in (b'{"a": [%s1]}' % (b"[]," * 60_000), b'{"a": [' + b"[]," * 60_000):
                gc.collect()
                seen.clear()
                with contextlib.suppress(ApiError):
                    parse_object(data, DEPTH)
                assert len(seen) < 50  # it would be 85 times, and each begins and ends
                assert gc.isenabled() == is_on
    finally:
        gc.callbacks.remove(note)
        gc.enable() if was_on else gc.disable()


def test_the_most_keys_are_taken_and_one_more_is_not() -> None:
    keys = b",".join(b'"%x":1' % number for number in range(MAX_KEYS))
    assert len(parse_object(b"{%s}" % keys, DEPTH)) == MAX_KEYS
    assert f"{MAX_KEYS + 1} keys" in refusal(b'{%s,"more":1}' % keys)


def test_a_long_text_costs_hardly_more_than_its_parser() -> None:
    """Parsing holds up all threads of the process: every microsecond for each KiB is seen in every stream."""
    data = b'{"prompt":"' + b"a " * 7 * 2**20 + b'"}'
    began_s = time.thread_time()
    parse_object(data, DEPTH)
    assert time.thread_time() - began_s < 0.25  # 0.03 s; a regular expression over all of it takes half a second
