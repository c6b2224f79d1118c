# SPDX-License-Identifier: MIT OR Apache-2.0
"""`CompletionChunks`: a completion's answer as events, one for each choice that has something new."""

from __future__ import annotations

from metrale_ray.serve.openai.completion_answer import CompletionWork
from metrale_ray.serve.openai.completion_choice import CompletionChoice
from metrale_ray.serve.openai.events import event
from metrale_ray.serve.openai.generation import Item
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.written import written_event


class CompletionChunks:
    """Writes the events of one call."""

    def __init__(self, work: CompletionWork) -> None:
        self._work = work
        self._choices = work.choices()
        self._usage = work.usage()
        self._pace = Pace()

    async def of(self, item: Item) -> bytes:
        """The events of what is new."""
        choices = await self._work.add(item, self._choices, self._usage, self._pace)
        return b"".join([await self._event(choice) for choice in choices if not choice.is_empty])

    def end(self) -> bytes:
        """The event with what the call took, where it is wanted."""
        if not self._work.include_usage:
            return b""
        return event({**self._work.head, "choices": [], "usage": self._usage.document()})

    async def _event(self, choice: CompletionChoice) -> bytes:
        told = choice.take()
        chunk = {**self._work.head, "choices": [told]}
        if self._work.include_usage:
            chunk["usage"] = self._usage.document() if self._work.continuous_usage else None
        is_short = told["logprobs"] is None and told.get("prompt_logprobs") is None
        return event(chunk) if is_short else await written_event(chunk, self._pace)
