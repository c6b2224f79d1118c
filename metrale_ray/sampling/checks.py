# SPDX-License-Identifier: MIT OR Apache-2.0
"""The checks of one parameter's value: a number, an integer, a flag, a list of ids, texts.

Rules: each takes the field's name and what was given, and returns it in one form or raises RequestError whose message
says what was given, what is allowed and what to change. A list's length is checked before any of its items is looked
at, and what was given is shown in at most 60 characters, so a refusal is quick and short however large the value is.

What it leaves out: which fields there are, and their limits (`token_params`, `params`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from metrale_ray.errors import RequestError

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

_POWERS = {U32_MAX: "2**32 - 1", U64_MAX: "2**64 - 1"}
# A token id as JSON has it where it is a key.
_DECIMAL = re.compile("0|[1-9][0-9]{0,9}")


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int from `low` to `high`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        allowed = f"an integer from {low} to {_POWERS.get(high, high)}"
        raise refusal(name, value, allowed, "a value in that range, or leave it out")
    return int(value)


def optional_integer(name: str, value: object, low: int, high: int) -> int | None:
    """`value` as an int from `low` to `high`, or None."""
    return None if value is None else integer(name, value, low, high)


def number(name: str, value: object, low: float, high: float, change: str, *, above: bool = False) -> float:
    """`value` as a finite float from `low` (not `low` itself when `above`) to `high`. -0.0 becomes 0.0."""
    allowed = f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(name, value, allowed, "a plain number")
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(name, value, allowed, "a finite number")
    if not low <= value <= high or (above and value == low):
        raise refusal(name, value, allowed, change)
    return float(value) + 0.0


def flag(name: str, value: object) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise refusal(name, value, "true or false", "one of these")
    return value


def token_ids(name: str, value: object, limit: int, *, kind: str = "a list of") -> tuple[int, ...]:
    """`value` as up to `limit` token ids, each from 0 to 2**32 - 1. None is no ids."""
    ids = items(name, value, limit, kind)
    # Long lists are looked at as a whole: item by item they would hold up other requests.
    if set(map(type, ids)) == {int}:
        plain = cast(Sequence[int], ids)
        if min(plain) >= 0 and max(plain) <= U32_MAX:
            return tuple(plain)
    return tuple(integer(name, token_id, 0, U32_MAX) for token_id in ids)


def token_sequences(name: str, value: object, limit: int, max_length: int) -> tuple[tuple[int, ...], ...]:
    """`value` as up to `limit` sequences, each of 1 to `max_length` token ids. None is no sequences."""
    sequences = []
    for given in items(name, value, limit, "a list of token id lists,"):
        ids = token_ids(name, given, max_length, kind="token id lists, each of")
        if not ids:
            raise refusal(name, given, f"token id lists, each of 1 to {max_length}", "no empty ones")
        sequences.append(ids)
    return tuple(sequences)


def biases(name: str, value: object, limit: int, bound: float) -> tuple[tuple[int, float], ...]:
    """`value`, a mapping from token ids to numbers (or its pairs), as pairs in order of the ids. None is no pairs.

    An id is an int, or a decimal str as JSON's keys are.
    """
    pairs: dict[int, float] = {}
    for key, bias in _pairs(name, value, limit):
        token_id = int(key) if isinstance(key, str) and _DECIMAL.fullmatch(key) else key
        with _told_as(name, "has the token id"):
            checked_id = integer(name, token_id, 0, U32_MAX)
        if checked_id in pairs:
            raise refusal(name, key, "each token id once", "one bias for it")
        with _told_as(name, f"has for token {checked_id} the bias"):
            pairs[checked_id] = number(name, bias, -bound, bound, "a bias in that range")
    return tuple(sorted(pairs.items()))


@contextmanager
def _told_as(name: str, what: str) -> Iterator[None]:
    """A refusal of the field `name` says which part of it is meant."""
    try:
        yield
    except RequestError as error:
        raise RequestError(error.message.replace(f"{name} is", f"{name} {what}", 1), param=name) from None


def texts(name: str, value: object, limit: int, max_characters: int) -> tuple[str, ...]:
    """`value`, one str or a list, as up to `limit` texts of 1 to `max_characters` characters. None is no texts."""
    given = (value,) if isinstance(value, str) else items(name, value, limit, "a string, or a list of")
    for text in given:
        if not isinstance(text, str):
            raise refusal(name, text, "strings", "only strings")
        if not 1 <= len(text) <= max_characters:
            allowed = f"strings of 1 to {max_characters} characters"
            raise refusal(name, text, allowed, f"shorter ones that are not empty (this has {len(text)} characters)")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise refusal(name, text, "valid Unicode", "strings without lone surrogates")
    return tuple(str(text) for text in given)


def items(name: str, value: object, limit: int, kind: str) -> Sequence[object]:
    """`value` as a sequence of at most `limit` items, refused before any item is looked at. None is no items."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise refusal(name, value, f"{kind} at most {limit}", "a list or a tuple")
    _check_length(name, len(value), limit)
    return value


def refusal(name: str, given: object, allowed: str, change: str) -> RequestError:
    """The error for one field. What was given is shown in at most 60 characters, however large it is."""
    return RequestError(f"{name} is {_shown(given)}; allowed is {allowed}; give {change}", param=name)


def _pairs(name: str, value: object, limit: int) -> Sequence[tuple[object, object]]:
    if isinstance(value, Mapping):
        _check_length(name, len(value), limit)
        return tuple(value.items())
    pairs = items(name, value, limit, "a mapping from token ids to biases, of")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise refusal(name, pair, "pairs of a token id and a bias", "a mapping")
    return [(pair[0], pair[1]) for pair in pairs]  # type: ignore[index]


def _check_length(name: str, length: int, limit: int) -> None:
    if length > limit:
        raise RequestError(f"{name} has {length} entries; allowed are at most {limit}; give fewer", param=name)


def _shown(given: object) -> str:
    if isinstance(given, int) and not isinstance(given, bool) and given.bit_length() > 128:
        return f"an integer of {given.bit_length()} bits"
    if isinstance(given, str | bytes | bytearray):
        given = given[:60]
    elif not isinstance(given, int | float | None):
        return f"of type {type(given).__name__}"
    text = ascii(given)
    return text if len(text) <= 60 else text[:57] + "..."
