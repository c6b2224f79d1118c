# SPDX-License-Identifier: MIT OR Apache-2.0
"""One JSON value (RFC 8259), read as its text comes.

Rules. Where the value ends, or stops being JSON, is found at that very character, and depends on the text alone. Time
is in proportion to the text. What it gives is the text itself, spaces within it too, but for one thing: a control
character within a string, which models write and JSON forbids, is given as its escape. So what a whole value gave is
valid JSON. Leaves out: the value itself; `json.loads` makes it of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 200
"""Objects and lists within one another: what common JSON parsers read."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSES = {"{": "}", "[": "]"}


class JsonValue:
    """Reads one value. `is_done`: it is whole. `is_broken`: what came is no JSON; nothing more is read then."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []  # the brackets around here
        self._parts: list[str] = []  # of its text, not drained yet
        self._number: list[str] = []
        self._rest = ""  # of a literal, such as "ue" of "true"
        self._num_digits = 0  # of a \u escape, still to come
        self._is_key = False  # whether the string being read is a key
        self._read: Callable[[str, int], int] = self._value

    def push(self, text: str, at: int) -> int:
        """Read on from `text[at]`; the place behind what was read. The first character must be the value's own."""
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._read(text, at)
        return at

    def drain(self) -> str:
        """What was read since the last time."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def _value(self, text: str, at: int) -> int:
        first = text[at]
        if first in "{[":
            return self._opened(text, at)
        if first == '"':
            self._read = self._string
            return self._take(text, at, at + 1)
        if first in "-0123456789":
            self._read = self._number_on
            return at
        if first not in _LITERALS:
            return self._fail(at)
        self._rest, self._read = _LITERALS[first], self._literal
        return at

    def _opened(self, text: str, at: int) -> int:
        if len(self._open) == MAX_DEPTH:
            return self._fail(at)
        self._open.append(text[at])
        self._read = self._first_in_list if text[at] == "[" else self._first_key
        return self._take(text, at, at + 1)

    def _first_in_list(self, text: str, at: int) -> int:
        at = self._take(text, at, space_end(text, at))
        if at == len(text):
            return at
        return self._closed(text, at) if text[at] == "]" else self._value(text, at)

    def _next_in_list(self, text: str, at: int) -> int:
        at = self._take(text, at, space_end(text, at))
        return at if at == len(text) else self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        at = self._take(text, at, space_end(text, at))
        if at < len(text) and text[at] == "}":
            return self._closed(text, at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        at = self._take(text, at, space_end(text, at))
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._is_key, self._read = True, self._string
        return self._take(text, at, at + 1)

    def _colon(self, text: str, at: int) -> int:
        at = self._take(text, at, space_end(text, at))
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._read = self._next_in_list
        return self._take(text, at, at + 1)

    def _behind(self, text: str, at: int) -> int:
        """Behind a value that is within another."""
        at = self._take(text, at, space_end(text, at))
        if at == len(text):
            return at
        if text[at] == _CLOSES[self._open[-1]]:
            return self._closed(text, at)
        if text[at] != ",":
            return self._fail(at)
        self._read = self._next_in_list if self._open[-1] == "[" else self._key
        return self._take(text, at, at + 1)

    def _closed(self, text: str, at: int) -> int:
        self._open.pop()
        self._ended()
        return self._take(text, at, at + 1)

    def _ended(self) -> None:
        """A value has ended."""
        self.is_done = not self._open
        self._read = self._behind

    def _string(self, text: str, at: int) -> int:
        at = self._take(text, at, _run_end(_PLAIN, text, at))
        if at == len(text):
            return at
        if text[at] == '"':
            return self._string_ended(text, at)
        if text[at] == "\\":
            self._read = self._escape
            return self._take(text, at, at + 1)
        self._parts.append(json.dumps(text[at])[1:-1])
        return at + 1

    def _string_ended(self, text: str, at: int) -> int:
        if self._is_key:
            self._is_key, self._read = False, self._colon
        else:
            self._ended()
        return self._take(text, at, at + 1)

    def _escape(self, text: str, at: int) -> int:
        if text[at] not in '"\\/bfnrtu':
            return self._fail(at)
        self._num_digits = 4 if text[at] == "u" else 0
        self._read = self._digit if self._num_digits else self._string
        return self._take(text, at, at + 1)

    def _digit(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._num_digits -= 1
        if self._num_digits == 0:
            self._read = self._string
        return self._take(text, at, at + 1)

    def _number_on(self, text: str, at: int) -> int:
        end = _run_end(_NUMBER_PART, text, at)
        self._number.append(text[at:end])
        self._take(text, at, end)
        if end == len(text):
            return end  # it may go on
        is_number = _NUMBER.fullmatch("".join(self._number)) is not None
        self._number.clear()
        if not is_number:
            return self._fail(end)
        self._ended()
        return end

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            return self._fail(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._ended()
        return self._take(text, at, at + 1)

    def _take(self, text: str, at: int, end: int) -> int:
        if end > at:
            self._parts.append(text[at:end])
        return end

    def _fail(self, at: int) -> int:
        self.is_broken = True
        return at


def space_end(text: str, at: int) -> int:
    """Where JSON's white space that begins at `text[at]` ends; `at` when there is none."""
    return _run_end(_SPACE, text, at)


def _run_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()
