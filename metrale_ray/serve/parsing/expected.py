# SPDX-License-Identifier: MIT OR Apache-2.0
"""One of a few fixed texts that may follow at a place, such as "]" or ",", read as its text comes."""

from __future__ import annotations

from collections.abc import Collection


class Expected:
    """Reads one of `texts`, of which none begins another. `found`: which. `is_missing`: none, and `held` was read."""

    def __init__(self, texts: Collection[str]) -> None:
        self.found: str | None = None
        self.is_missing = False
        self.held = ""
        self._texts = texts

    def push(self, text: str, at: int) -> int:
        """Read on from `text[at]`; the place behind what was read."""
        while at < len(text):
            longer = self.held + text[at]
            if not any(one.startswith(longer) for one in self._texts):
                self.is_missing = True
                return at
            self.held = longer
            at += 1
            if longer in self._texts:
                self.found = longer
                return at
        return at
