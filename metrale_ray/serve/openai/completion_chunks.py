# SPDX-License-Identifier: MIT OR Apache-2.0
"""`CompletionChunks`: a completion's answer as events, one for each choice that has something new."""

from __future__ import annotations

from typing import Any

from metrale_ray.serve.openai.completion_answer import CompletionWork
from metrale_ray.serve.openai.events import event
from metrale_ray.serve.openai.generation import Item


class CompletionChunks:
    """Writes the events of one call."""

    def __init__(self, work: CompletionWork) -> None:
        self._work = work
        self._choices = work.choices()
        self._usage = work.usage()

    def of(self, item: Item) -> bytes:
        """The events of what is new."""
        choices = self._work.add(item, self._choices, self._usage)
        return b"".join(self._event([choice.take()]) for choice in choices if not choice.is_empty)

    def end(self) -> bytes:
        """The event with what the call took, where it is wanted."""
        if not self._work.include_usage:
            return b""
        return event({**self._work.head, "choices": [], "usage": self._usage.document()})

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._work.head, "choices": choices}
        if self._work.include_usage:
            chunk["usage"] = self._usage.document() if self._work.continuous_usage else None
        return event(chunk)
