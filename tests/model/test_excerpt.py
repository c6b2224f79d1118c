# SPDX-License-Identifier: MIT OR Apache-2.0
"""A value from a file in a message: short and on one line, whatever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from metrale_ray.model.excerpt import MAX_CHARACTERS, excerpt
from tests.model.families import odd_values


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), ("a\nb", r"'a\nb'"), (None, "None"), ([1, "x", {"a": 2.5}], "[1, 'x', {'a': 2.5}]")]
)
def test_a_short_value_is_shown_as_it_is(value: object, text: str) -> None:
    assert excerpt(value) == text


def test_of_a_long_value_both_ends_are_shown() -> None:
    assert excerpt(10**400 + 7).startswith("1000")
    assert excerpt(10**400 + 7).endswith("0007")
    assert excerpt("a" + "x" * 1000 + "z")[:2] == "'a"
    assert excerpt(list(range(10_000))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"


@given(odd_values.values())
def test_any_value_is_short_on_one_line_and_can_be_written(value: object) -> None:
    text = excerpt(value)
    assert len(text.encode()) <= 4 * MAX_CHARACTERS + 3
    assert "\n" not in text


def test_a_value_as_deep_as_a_file_may_hold_is_shown() -> None:
    assert excerpt(json.loads("[" * 900 + "]" * 900)) == "[[[[...]]]]"
