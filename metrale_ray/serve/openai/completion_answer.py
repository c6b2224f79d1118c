# SPDX-License-Identifier: MIT OR Apache-2.0
"""The answer to a completion that is not streamed, and what every answer of this kind is made from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from metrale_ray.serve.openai.completion_choice import CompletionChoice, CompletionShape
from metrale_ray.serve.openai.generation import Generation, Item
from metrale_ray.serve.openai.lead import Lead
from metrale_ray.serve.openai.logprobs import Entry, prompt_logprobs
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.usage import Usage
from metrale_ray.serve.text import Tokenizer


@dataclass(slots=True)
class CompletionWork:
    """One call that may begin. `num_shown` of the answers that each prompt gets are shown."""

    generation: Generation
    leads: Sequence[Lead]
    shape: CompletionShape
    num_shown: int
    tokenizer: Tokenizer | None
    head: dict[str, Any]  # what each object begins with: id, object, created, model
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def num_generated(self) -> int:
        """The answers that are generated for each prompt."""
        return self.generation.requests[0].params.n

    def choices(self) -> list[list[CompletionChoice]]:
        """For each prompt the choices that it will have, still empty."""
        return [
            [
                CompletionChoice(number * self.num_generated + index, self.shape, lead, self.tokenizer)
                for index in range(self.num_generated)
            ]
            for number, lead in enumerate(self.leads)
        ]

    def usage(self) -> Usage:
        """Counts before the first token."""
        return Usage(self.generation.num_prompt_tokens)

    async def add(
        self, item: Item, choices: Sequence[Sequence[CompletionChoice]], usage: Usage, pace: Pace
    ) -> list[CompletionChoice]:
        """Give each choice what is new of it; those that there is something new of, in order."""
        found = []
        for number, delta in item:
            if delta.prompt_logprobs is not None:
                await self._tell_lead(self.leads[number], delta.prompt_logprobs, pace)
            for sequence in delta.sequences:
                choice = choices[number][sequence.index]
                await choice.add(sequence, pace)
                await pace.did(len(sequence.token_ids))
                if self.shape.has_answer:
                    usage.num_completion_tokens += len(sequence.token_ids)
                if choice.finish_reason is not None:
                    self.generation.note_finished(choice.finish_reason)
                found.append(choice)
        return found

    async def _tell_lead(self, lead: Lead, entries: Sequence[Entry | None], pace: Pace) -> None:
        """Once for all answers to its prompt."""
        if self.shape.prompt_logprobs is not None:
            lead.prompt_logprobs = await prompt_logprobs(entries, self.shape.prompt_logprobs, pace)
        if self.shape.has_echo and self.shape.logprobs is not None:
            count, tokenizer = self.shape.logprobs, self.tokenizer
            await lead.logprobs.add(lead.token_ids, entries, lead.offsets, count, tokenizer, pace)


async def whole_completion(work: CompletionWork) -> dict[str, Any]:
    """OpenAI's object. Raises ApiError. Cancelling it aborts the work."""
    choices, usage, pace = work.choices(), work.usage(), Pace()
    async with aclosing(work.generation.items()) as items:
        async for item in items:
            await work.add(item, choices, usage, pace)
    shown = [choice for each in choices for choice in _best(each, work.num_shown)]
    for index, choice in enumerate(shown):
        choice.index = index
    return {**work.head, "choices": [choice.take() for choice in shown], "usage": usage.document()}


def _best(choices: Sequence[CompletionChoice], count: int) -> list[CompletionChoice]:
    """The `count` likeliest per token, the likeliest first; all of them in their own order where none is left out."""
    if count == len(choices):
        return list(choices)
    return sorted(choices, key=lambda choice: -choice.mean_logprob)[:count]
