# SPDX-License-Identifier: MIT OR Apache-2.0
"""The strings that end a text, found in a text that comes in pieces.

Rules. Where a stop string ends the text depends on the text alone, never on how it was cut into pieces. What is shown
is never taken back, and nothing is held back but what may still become a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from metrale_ray.errors import RequestError


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string: `depth` characters. `stop` is the longest stop string that ends here."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    stop: str | None = None


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    The first is the one that is complete first; of those that end at the same character, the longest. The search is
    that of Aho and Corasick, "Efficient string matching" (1975): one step per character, and the depth of its state is
    the length of the longest suffix that may become a stop string, which is all that is held back. With `included` the
    stop string itself is shown too, so nothing is held back.
    """

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        """Raises RequestError when a stop string is empty."""
        if not all(stop):
            raise RequestError("a stop string is empty; leave it out or give at least one character", param="stop")
        self.found: str | None = None
        self._included = included
        self._root = _automaton(stop)
        self._state = self._root
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """The text that can be shown, and the stop string found. After one was found nothing more is shown.

        A stop string whose last character is in a `text` that may not end is none; one that began in it may be.
        """
        if self.found is not None:
            return "", self.found
        if not self._root.next:
            return text, None  # nothing is looked for
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            self._state = self._step(pending[position])
            if self._state.stop is not None and may_end:
                return self._end(pending[: position + 1], self._state.stop), self.found
        cut = len(pending) if self._included else len(pending) - self._open_depth()
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The text held back, at the end of a text that no stop string ended."""
        rest, self._held, self._state = self._held, "", self._root
        return rest

    def _step(self, character: str) -> _Node:
        state: _Node | None = self._state
        while state is not None and character not in state.next:
            state = state.fallback
        return self._root if state is None else state.next[character]

    def _end(self, text: str, stop: str) -> str:
        self.found, self._held = stop, ""
        return text if self._included else text[: -len(stop)]

    def _open_depth(self) -> int:
        """Characters at the end that may still become a stop string: not those of one that was passed over."""
        state = self._state
        while not state.next and state.fallback is not None:
            state = state.fallback
        return state.depth


def _automaton(stop: Sequence[str]) -> _Node:
    root = _Node(0)
    for text in stop:
        node = root
        for character in text:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = text
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Give each node its fallback: the longest proper suffix of it that is a prefix of a stop string too."""
    todo = deque([root])
    while todo:
        node = todo.popleft()
        for character, child in node.next.items():
            suffix = node.fallback
            while suffix is not None and character not in suffix.next:
                suffix = suffix.fallback
            child.fallback = root if suffix is None else suffix.next[character]
            child.stop = child.stop or child.fallback.stop
            todo.append(child)
