# SPDX-License-Identifier: MIT OR Apache-2.0
"""A fixed text, such as "<tool_call>", found in a text that comes in pieces. Time is in proportion to the text."""

from __future__ import annotations


class Marker:
    """Looks for `marker`. What may still become it is held back."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.held = ""

    def push(self, text: str, at: int) -> tuple[str, int, bool]:
        """Look from `text[at]` on: the text in front of the marker, the place behind what was read, and whether it is
        there. Without it all of the text is read."""
        if self.held:
            return self._go_on(text, at)
        place = text.find(self.marker, at)
        if place >= 0:
            return text[at:place], place + len(self.marker), True
        self.held = begun(text[max(at, len(text) - len(self.marker)) :], self.marker)
        return text[at : len(text) - len(self.held)], len(text), False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held

    def _go_on(self, text: str, at: int) -> tuple[str, int, bool]:
        """What is held back, and as much more as it needs to become the marker."""
        ahead = text[at : at + len(self.marker) - 1]
        window, held = self.held + ahead, len(self.held)
        place = window.find(self.marker)
        if place >= 0:
            self.held = ""
            return window[:place], at + place + len(self.marker) - held, True
        self.held = begun(window, self.marker)
        if at + len(ahead) < len(text):
            # Enough came to know that no marker begins in what was held: look again from the first new character.
            given, self.held = window[:held], ""
            rest, end, is_found = self.push(text, at)
            return given + rest, end, is_found
        return window[: len(window) - len(self.held)], len(text), False


def begun(text: str, marker: str) -> str:
    """The longest end of `text` that `marker` begins with, and is longer than."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return marker[:length]
    return ""
