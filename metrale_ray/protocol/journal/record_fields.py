# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the fields of records share: texts cut to what a reader takes, and arrays that stand for a few named fields.

Rules: a text that is too long is cut when written, so that a long message never costs a record. An array may be longer
than this build knows; what follows is of a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.protocol.fields import Fields, cut_text
from metrale_ray.protocol.limits import (
    MAX_CODE_CHARS,
    MAX_KEY_CHARS,
    MAX_MAP_ENTRIES,
    MAX_REFUSAL_CHARS,
    MAX_VALUE_CHARS,
    U64_MAX,
)

MAX_LIST = 2**16
"""Elements of one array: the sequences of a snapshot are the most there are."""

MAX_RANKS = 4096
"""Ranks of one group: far more than there are."""


def cut_message(text: str) -> str:
    """A text for people, no longer than `read_message` takes."""
    return cut_text(text, MAX_REFUSAL_CHARS)


def cut_code(text: str) -> str:
    """An error's code, no longer than `read_code` takes."""
    return cut_text(text, MAX_CODE_CHARS)


def cut_entries(entries: Mapping[str, str]) -> dict[str, str]:
    """A map of texts, none longer than `read_entries` takes."""
    return {cut_text(name, MAX_KEY_CHARS): cut_text(value, MAX_VALUE_CHARS) for name, value in entries.items()}


def read_message(fields: Fields, key: str) -> str:
    """A text for people."""
    return fields.text(key, MAX_REFUSAL_CHARS)


def read_code(fields: Fields) -> str:
    """An error's code, in the field `code`."""
    return fields.text("code", MAX_CODE_CHARS)


def read_entries(fields: Fields, key: str) -> dict[str, str]:
    """A map of texts to texts."""
    return fields.texts(key, MAX_MAP_ENTRIES, MAX_KEY_CHARS, MAX_VALUE_CHARS)


def read_word(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    """One of the words that are known."""
    word = fields.text(key, MAX_CODE_CHARS)
    if word not in known:
        raise fields.error(f"{key} is {word!r}; known are {', '.join(known)}")
    return word


def read_u64s(fields: Fields, key: str, max_count: int) -> tuple[int, ...]:
    """An array of integers of 0..2**64-1."""
    values = fields.array(key, max_count)
    if any(type(value) is not int or not 0 <= value <= U64_MAX for value in values):
        raise fields.error(f"{key} must hold integers from 0 to {U64_MAX}")
    return tuple(values)


def read_tuples(fields: Fields, key: str, max_count: int, kinds: tuple[type, ...]) -> list[list[Any]]:
    """An array of arrays that begin with elements of `kinds`; integers among them are not negative."""
    rows = fields.array(key, max_count)
    expected, length = list(kinds), len(kinds)
    for index, row in enumerate(rows):
        if type(row) is not list or list(map(type, row[:length])) != expected:
            raise fields.error(f"{key}[{index}] must be an array of {', '.join(kind.__name__ for kind in kinds)}")
        if any(type(value) is int and value < 0 for value in row[:length]):
            raise fields.error(f"{key}[{index}] holds a negative number")
    return rows


def named(fields: Fields, key: str, values: Any, names: tuple[str, ...]) -> Fields:
    """An array of at least `len(names)` elements, as fields of those names."""
    if type(values) is not list or len(values) < len(names):
        raise fields.error(f"{key} must be an array of {', '.join(names)}")
    return Fields(dict(zip(names, values, strict=False)))
