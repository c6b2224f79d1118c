# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ChatChunks`: a chat's answer as events: the role first, then what comes, and the end of each choice by itself."""

from __future__ import annotations

from typing import Any

from metrale_ray.serve.openai.chat_answer import ChatWork
from metrale_ray.serve.openai.events import event
from metrale_ray.serve.openai.generation import Item


class ChatChunks:
    """Writes the events of one call."""

    def __init__(self, work: ChatWork) -> None:
        self._work = work
        self._choices = work.choices()
        self._usage = work.usage()
        self._is_first = True

    def of(self, item: Item) -> bytes:
        """The events of what is new."""
        more = self._work.of_prompt(item) if self._is_first else {}
        self._is_first = False
        found = []
        for choice in self._work.add(item, self._choices, self._usage):
            for told in choice.deltas():
                found.append(self._event([told], more))
                more = {}
        return b"".join(found)

    def end(self) -> bytes:
        """The event with what the call took, where it is wanted."""
        if not self._work.include_usage:
            return b""
        return event({**self._work.head, "choices": [], "usage": self._usage.document()})

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        chunk = {**self._work.head, "choices": choices, **more}
        if self._work.include_usage:
            chunk["usage"] = self._usage.document() if self._work.continuous_usage else None
        return event(chunk)
