# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model's text is made of for its reader: content, reasoning and calls of tools, as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New of one call of a tool. `name` comes once per index, with the first of it; `arguments` are a part of JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push made certain; any of it may be empty. Reasoning comes before content, content before calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class OutputParser(Protocol):
    """Reads one answer as it grows. What it gives, joined, depends on the text alone, not on how it was cut."""

    def push(self, text: str) -> Piece:
        """Take the text that is new."""
        ...

    def flush(self) -> Piece:
        """The end of the text: what was held back. A call that is not whole stays as it is."""
        ...

    @property
    def has_calls(self) -> bool:
        """Whether at least one call is whole, and none is cut: the answer's finish reason is then "tool_calls"."""
        ...

    @property
    def has_cut_call(self) -> bool:
        """Whether a call that was given is not whole: the answer's finish reason is then "length"."""
        ...
