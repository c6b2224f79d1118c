# SPDX-License-Identifier: MIT OR Apache-2.0
"""One call of a tool as a name and its arguments behind it: `name[ARGS]{...}`, as Mistral's newer models write it."""

from __future__ import annotations

import re
from collections.abc import Callable

from metrale_ray.serve.parsing.expected import Expected
from metrale_ray.serve.parsing.json_value import JsonValue, space_end

CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MAX_WORD_CHARACTERS = 64
"""Of a name, as OpenAI has it, and of an id."""
_WORD = re.compile(r"[A-Za-z0-9_.-]*")


def begins_name(character: str) -> bool:
    """Whether a name may begin with it."""
    return _WORD.fullmatch(character) is not None


class NamedCall:
    """Reads one call; see `CallReader`. It is certain with the bracket of its arguments."""

    is_short = True

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._word = ""
        self._name = ""
        self._followers: dict[str, Callable[[str, int], int]] = {
            CALL_ID: self._in_id,
            ARGUMENTS: self._before_arguments,
        }
        self._expected = Expected(())
        self._arguments = JsonValue()
        self._read: Callable[[str, int], int] = self._in_name

    def push(self, text: str, at: int) -> int:
        """Read on from `text[at]`; the place behind what was read."""
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._read(text, at)
        return at

    def drain(self) -> str:
        """The arguments that were read since the last time."""
        return self._arguments.drain()

    def _in_name(self, text: str, at: int) -> int:
        at = self._on(text, at)
        if at < len(text):
            self._name = self._word
        return at

    def _in_id(self, text: str, at: int) -> int:
        return self._on(text, at)

    def _on(self, text: str, at: int) -> int:
        """Read on in a word, and behind it go on with what follows."""
        match = _WORD.match(text, at)
        end = at if match is None else match.end()
        self._word += text[at:end]
        if len(self._word) > MAX_WORD_CHARACTERS:
            self.is_broken = True
        elif end < len(text):
            self._expect()
        return end

    def _expect(self) -> None:
        self._expected, self._read = Expected(self._followers), self._behind_word

    def _behind_word(self, text: str, at: int) -> int:
        if not self._expected.held:
            at = space_end(text, at)
            if at < len(text) and text[at] == "{":
                return self._before_arguments(text, at)
        at = self._expected.push(text, at)
        self.is_broken = self._expected.is_missing
        if self._expected.found is not None:
            self._word, self._read = "", self._followers.pop(self._expected.found)
        return at

    def _before_arguments(self, text: str, at: int) -> int:
        at = space_end(text, at)
        if at == len(text):
            return at
        if text[at] != "{":
            self.is_broken = True
            return at
        self.name, self._read = self._name, self._in_arguments
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        at = self._arguments.push(text, at)
        self.is_done, self.is_broken = self._arguments.is_done, self._arguments.is_broken
        return at
