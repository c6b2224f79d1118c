# SPDX-License-Identifier: MIT OR Apache-2.0
"""One call of a tool as a JSON object with its name and its arguments, read as its text comes.

Rules. It is certain to be a call when its name and the beginning of its arguments are there, and whole when the object
is closed. Its keys come in any order; arguments in front of the name wait for it. Arguments are an object; those that
are missing or null are {}, and an object that was written as a string is taken out of it. Other keys are passed over,
or, where `known` says which names there are, make the object no call: it may be an answer in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set

from metrale_ray.serve.parsing.json_value import JsonValue, space_end

_ARGUMENTS = ("arguments", "parameters")
_COMPANIONS = ("type", "id")  # what some models write beside them
NO_ARGUMENTS = "{}"
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no answer can carry


class CallObject:
    """Reads one call. `name` is None, and `drain` gives nothing, until it is certain that it is a call.

    `is_done`: it is whole. `is_broken`: what came is no call, or no JSON; nothing more is read then. See `CallReader`.
    """

    is_short = False

    def __init__(self, known: Set[str] | None = None) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._known = known
        self._name: str | None = None
        self._has_arguments = False
        self._parts: list[str] = []  # arguments that were not drained yet
        self._key = ""
        self._value = JsonValue()
        self._read: Callable[[str, int], int] = self._open

    def push(self, text: str, at: int) -> int:
        """Read on from `text[at]`; the place behind what was read. The first character must be its bracket."""
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._read(text, at)
        return at

    def drain(self) -> str:
        """The arguments that were read since the last time."""
        if self.name is None:
            return ""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._read = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at < len(text) and text[at] == "}":
            return self._close(at)
        return self._before_key(text, at)

    def _before_key(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._value, self._read = JsonValue(), self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        at = self._on(text, at)
        if self._value.is_done:
            self._key = str(json.loads(self._value.drain()))
            self._read = self._colon
            if not self._may_have(self._key):
                return self._fail(at)
        return at

    def _may_have(self, key: str) -> bool:
        if key == "name":
            return self._name is None
        if key in _ARGUMENTS:
            return not self._has_arguments
        return self._known is None or key in _COMPANIONS

    def _colon(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._read = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at == len(text):
            return at
        self._value = JsonValue()
        reader = self._reader(text[at])
        if reader is None:
            return self._fail(at)
        self._read = reader
        return at

    def _reader(self, first: str) -> Callable[[str, int], int] | None:
        """What reads the value that begins with `first`; None when the key can have no such value."""
        if self._key == "name":
            return self._in_name if first == '"' else None
        if self._key not in _ARGUMENTS:
            return self._in_other
        self._has_arguments = True
        if first == "{":
            self.name = self._name
            return self._in_arguments
        return self._in_written if first in '"n' else None

    def _in_name(self, text: str, at: int) -> int:
        at = self._on(text, at)
        if self._value.is_done:
            name = str(json.loads(self._value.drain()))
            if not name or not name.isprintable() or (self._known is not None and name not in self._known):
                return self._fail(at)
            self._name = name
            self._make_certain()
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        at = self._on(text, at)
        self._parts.append(self._value.drain())
        return at

    def _in_written(self, text: str, at: int) -> int:
        """Arguments that are null, or written into a string."""
        at = self._on(text, at)
        if self._value.is_done:
            arguments = _unwritten(json.loads(self._value.drain()))
            if arguments is None:
                return self._fail(at)
            self._parts.append(arguments)
            self._make_certain()
        return at

    def _in_other(self, text: str, at: int) -> int:
        at = self._on(text, at)
        self._value.drain()
        return at

    def _make_certain(self) -> None:
        if self._has_arguments:
            self.name = self._name

    def _on(self, text: str, at: int) -> int:
        """Read on in the value, and behind it go on with what follows."""
        at = self._value.push(text, at)
        self.is_broken = self._value.is_broken
        if self._value.is_done:
            self._read = self._behind
        return at

    def _behind(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] != ",":
            return self._fail(at)
        self._read = self._before_key
        return at + 1

    def _close(self, at: int) -> int:
        if self._name is None:
            return self._fail(at + 1)
        if not self._has_arguments:
            self._parts.append(NO_ARGUMENTS)
        self.name, self.is_done = self._name, True
        return at + 1

    def _fail(self, at: int) -> int:
        self.is_broken = True
        return at


def _unwritten(written: str | None) -> str | None:
    """The object that is written in a string, {} for none at all; None when it is no object."""
    text = (written or "").strip()
    if not text:
        return NO_ARGUMENTS
    value = JsonValue()
    is_whole = text[0] == "{" and value.push(text, 0) == len(text) and value.is_done
    return value.drain() if is_whole and not _SURROGATE.search(text) else None
