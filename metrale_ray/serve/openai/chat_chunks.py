# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ChatChunks`: a chat's answer as events: the role first, then what comes, and the end of each choice by itself."""

from __future__ import annotations

from typing import Any

from metrale_ray.serve.openai.chat_answer import ChatWork
from metrale_ray.serve.openai.events import event
from metrale_ray.serve.openai.generation import Item
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.written import written_event


class ChatChunks:
    """Writes the events of one call."""

    def __init__(self, work: ChatWork) -> None:
        self._work = work
        self._choices = work.choices()
        self._usage = work.usage()
        self._pace = Pace()
        self._is_first = True

    async def of(self, item: Item) -> bytes:
        """The events of what is new."""
        more = await self._work.of_prompt(item, self._pace) if self._is_first else {}
        self._is_first = False
        found = []
        for choice in await self._work.add(item, self._choices, self._usage, self._pace):
            for told in choice.deltas():
                found.append(await self._event(told, more))
                more = {}
        return b"".join(found)

    def end(self) -> bytes:
        """The event with what the call took, where it is wanted."""
        if not self._work.include_usage:
            return b""
        return event({**self._work.head, "choices": [], "usage": self._usage.document()})

    async def _event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        chunk = {**self._work.head, "choices": [choice], **more}
        if self._work.include_usage:
            chunk["usage"] = self._usage.document() if self._work.continuous_usage else None
        is_short = choice["logprobs"] is None and not more
        return event(chunk) if is_short else await written_event(chunk, self._pace)
