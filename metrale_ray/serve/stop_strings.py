# SPDX-License-Identifier: MIT OR Apache-2.0
"""The strings that end a text, found in a text that comes in pieces.

Rules. Where a stop string ends the text depends on the text alone, never on how it was cut into pieces. What is shown
is never taken back, and nothing is held back but what may still become a stop string. What depends on the stop strings
alone is made once, and a text being searched keeps two numbers and what is held back: one call may have thousands of
texts with the same long stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrale_ray.errors import RequestError


class StopAutomaton:
    """The automaton of some stop strings, which any number of `StopStrings` may share. Nothing changes it.

    It is that of Aho and Corasick, "Efficient string matching" (1975). A state is a number and stands for a prefix of a
    stop string; 0 is the empty one. Its size is that of the stop strings. There are numbers in flat tables instead of
    objects that know one another, as thousands of these would make the garbage collector stop everything for long.
    """

    __slots__ = ("_fallbacks", "_nexts", "open_depths", "stops")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises RequestError when a stop string is empty."""
        if not all(stop):
            raise RequestError("a stop string is empty; leave it out or give at least one character", param="stop")
        trie = _Trie(stop)
        fallbacks, stops = trie.links()
        self._nexts = trie.nexts
        self._fallbacks = tuple(fallbacks)
        self.stops: tuple[str | None, ...] = tuple(stops)
        """For each state the longest stop string that ends with its last character."""
        self.open_depths = tuple(trie.open_depths(fallbacks))
        """For each state the characters at the end of the text that may still become a stop string: not those of one
        that is complete and was passed over."""

    @property
    def num_states(self) -> int:
        """One for each prefix. 1: nothing is looked for."""
        return len(self.stops)

    def step(self, state: int, character: str) -> int:
        """The state after one more character: of the longest suffix of the text that is a prefix of a stop string."""
        code = ord(character)
        while state >= 0:
            following = self._nexts.get(state << _CODE_BITS | code)
            if following is not None:
                return following
            state = self._fallbacks[state]
        return 0


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    The first is the one that is complete first; of those that end at the same character, the longest. The search takes
    one step per character, and what its state leaves open is all that is held back. With `included` the stop string
    itself is shown too, so nothing is held back.
    """

    __slots__ = ("_automaton", "_held", "_included", "_state", "found")

    def __init__(self, automaton: StopAutomaton, *, included: bool = False) -> None:
        self.found: str | None = None
        self._automaton = automaton
        self._included = included
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string found. After one was found nothing more is shown.

        A stop string whose last character is in a `text` that may not end is none; one that began in it may be.
        """
        if self.found is not None:
            return "", self.found
        automaton = self._automaton
        if automaton.num_states == 1:
            return text, None  # nothing is looked for
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            self._state = automaton.step(self._state, pending[position])
            stop = automaton.stops[self._state]
            if stop is not None and may_end:
                return self._end(pending[: position + 1], stop), stop
        cut = len(pending) if self._included else len(pending) - automaton.open_depths[self._state]
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The text held back, at the end of a text that no stop string ended."""
        rest, self._held, self._state = self._held, "", 0
        return rest

    def _end(self, text: str, stop: str) -> str:
        self.found, self._held = stop, ""
        return text if self._included else text[: -len(stop)]


_CODE_BITS = 21
"""Bits of a character's code; what is above them in a key of `_Trie.nexts` is the state."""


class _Trie:
    """The prefixes of some texts, numbered in the order in which they were met, and so each behind its own prefixes."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.nexts: dict[int, int] = {}  # from a state and a character to the state behind it
        self._keys = [-1]  # for each state the key that leads to it
        self._depths = [0]
        self._ends: dict[int, str] = {}
        self._inner: set[int] = set()  # states that another one follows
        for text in texts:
            self._ends[self._add(text)] = text

    def _add(self, text: str) -> int:
        state = 0
        for character in text:
            key = state << _CODE_BITS | ord(character)
            following = self.nexts.get(key)
            if following is None:
                following = self.nexts[key] = len(self._keys)
                self._inner.add(state)
                self._keys.append(key)
                self._depths.append(self._depths[state] + 1)
            state = following
        return state

    def links(self) -> tuple[list[int], list[str | None]]:
        """For each state its fallback, the longest proper suffix of it that is a state too (-1 for that of the empty
        one), and the longest text that it ends with."""
        fallbacks, stops = [-1] * len(self._keys), [self._ends.get(state) for state in range(len(self._keys))]
        for state in self._short_to_long():
            parent, code = divmod(self._keys[state], 1 << _CODE_BITS)
            suffix = fallbacks[parent]
            while suffix >= 0 and suffix << _CODE_BITS | code not in self.nexts:
                suffix = fallbacks[suffix]
            fallbacks[state] = 0 if suffix < 0 else self.nexts[suffix << _CODE_BITS | code]
            stops[state] = stops[state] or stops[fallbacks[state]]
        return fallbacks, stops

    def open_depths(self, fallbacks: Sequence[int]) -> list[int]:
        """For each state the depth of its longest suffix that goes on: itself, or one of its fallbacks."""
        depths = [0] * len(self._keys)
        for state in self._short_to_long():
            depths[state] = self._depths[state] if state in self._inner else depths[fallbacks[state]]
        return depths

    def _short_to_long(self) -> list[int]:
        """All states but the empty one, so that each comes behind its fallback."""
        return sorted(range(1, len(self._keys)), key=self._depths.__getitem__)
