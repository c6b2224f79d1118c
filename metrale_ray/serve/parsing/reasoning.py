# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reasoning in front of an answer, as DeepSeek R1, Qwen 3 and others write it: `<think>...</think>`.

Rules. It is the first thing in an answer, or the answer begins within it, as some templates open it. `<think>` later in
the answer is content. White space at both ends of the reasoning, and in front of the content behind it, is not shown.
Reasoning that does not end is all reasoning. What follows it goes to the parser of calls; calls within it are none.
"""

from __future__ import annotations

from dataclasses import replace

from metrale_ray.serve.parsing.content_text import SPACES, ContentText
from metrale_ray.serve.parsing.marker import Marker
from metrale_ray.serve.parsing.pieces import OutputParser, Piece

BEGIN = "<think>"
END = "</think>"


class Reasoning:
    """An `OutputParser` around `inner`, which reads what follows. `is_open`: the answer begins within the reasoning."""

    def __init__(self, inner: OutputParser, *, is_open: bool = False) -> None:
        self._inner = inner
        self._is_open = is_open
        self._spaces: list[str] = []  # with which the answer begins
        self._begun = ""  # what follows them, as long as it may become `BEGIN`
        self._is_starting = True
        self._is_reasoning = False
        self._is_behind = False  # directly behind the reasoning
        self._reasoning = ContentText(is_at_edge=True)
        self._end = Marker(END)

    @property
    def has_calls(self) -> bool:
        """Whether the part behind the reasoning has whole calls."""
        return self._inner.has_calls

    @property
    def has_cut_call(self) -> bool:
        """Whether the part behind the reasoning has a call that is cut."""
        return self._inner.has_cut_call

    def push(self, text: str) -> Piece:
        """Take the text that is new."""
        if self._is_starting:
            text = self._started(text)
        content = self._reason(text) if self._is_reasoning else text
        if self._is_behind:
            content = content.lstrip(SPACES)
            self._is_behind = not content
        piece = self._inner.push(content) if content else Piece()
        return replace(piece, reasoning=self._reasoning.drain())

    def flush(self) -> Piece:
        """The end of the text."""
        first = Piece()
        if self._is_starting:
            self._is_starting, self._is_reasoning = False, self._is_open
            first = self.push(self._started_with())
        if self._is_reasoning:
            self._reasoning.add(self._end.flush())
        reasoning = first.reasoning + self._reasoning.drain()
        rest = self._inner.flush()
        return Piece(reasoning, first.content + rest.content, first.calls + rest.calls)

    def _started(self, text: str) -> str:
        """What is to be read of the answer's beginning: nothing as long as it may become `BEGIN`."""
        if not self._begun:
            rest = text.lstrip(SPACES)
            self._spaces.append(text[: len(text) - len(rest)])
            text = rest
        self._begun += text
        if len(self._begun) < len(BEGIN) and BEGIN.startswith(self._begun):
            return ""
        self._is_starting = False
        has_begun = self._begun.startswith(BEGIN)
        self._is_reasoning = has_begun or self._is_open
        return self._begun.removeprefix(BEGIN) if has_begun else self._started_with()

    def _started_with(self) -> str:
        return "".join(self._spaces) + self._begun

    def _reason(self, text: str) -> str:
        """Take reasoning; what is behind its end."""
        reasoning, at, is_found = self._end.push(text, 0)
        self._reasoning.add(reasoning)
        if not is_found:
            return ""
        self._reasoning.edge()
        self._is_reasoning, self._is_behind = False, True
        return text[at:]
