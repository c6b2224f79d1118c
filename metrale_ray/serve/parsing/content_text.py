# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text for the reader that is broken by what is not: the white space around that is shown once, or not at all."""

from __future__ import annotations

SPACES = " \t\r\n"


class ContentText:
    """Gathers text. White space at its end is held back until it is known what follows.

    `is_at_edge`: white space at its beginning is dropped.
    """

    def __init__(self, *, is_at_edge: bool = False) -> None:
        self._is_at_edge = is_at_edge
        self._drops_spaces = is_at_edge  # those behind the edge
        self._has_shown = False
        self._shown: list[str] = []
        self._spaces: list[str] = []

    def add(self, text: str) -> None:
        """Take text that is for the reader."""
        if self._is_at_edge and self._drops_spaces:
            text = text.lstrip(SPACES)
        body = text.rstrip(SPACES)
        if body:
            self._shown += [*self._spaces, body]
            self._spaces.clear()
            self._is_at_edge, self._has_shown = False, True
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def edge(self) -> None:
        """Here is something else. White space beside it is shown only where there is text on both sides of it: that in
        front of it, or else that behind it."""
        if not self._has_shown:
            self._spaces.clear()
        self._drops_spaces = bool(self._spaces) or not self._has_shown
        self._is_at_edge = True

    def drain(self) -> str:
        """What can be shown and was not yet."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def flush(self) -> str:
        """The end of the text: its white space belongs to it, unless it is at an edge."""
        if not self._is_at_edge:
            self._shown += self._spaces
        self._spaces.clear()
        return self.drain()
