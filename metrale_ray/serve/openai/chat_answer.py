# SPDX-License-Identifier: MIT OR Apache-2.0
"""The answer to a chat that is not streamed, and what every answer of this kind is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from metrale_ray.serve.openai.chat_choice import ChatChoice, ChatShape
from metrale_ray.serve.openai.generation import Generation, Item
from metrale_ray.serve.openai.logprobs import prompt_logprobs
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.usage import Usage
from metrale_ray.serve.parsing.pieces import OutputParser
from metrale_ray.serve.prompts import PromptRequest
from metrale_ray.serve.text import Tokenizer


@dataclass(slots=True)
class ChatWork:
    """One call that may begin. `prompt_logprobs`: how many likely tokens to tell for the prompt's, None for none."""

    generation: Generation
    shape: ChatShape
    new_parser: Callable[[], OutputParser]
    tokenizer: Tokenizer | None
    head: dict[str, Any]  # what each object begins with: id, object, created, model
    prompt_logprobs: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def request(self) -> PromptRequest:
        """A chat has one prompt."""
        return self.generation.requests[0]

    def choices(self) -> list[ChatChoice]:
        """The choices of the answer, still empty."""
        count = self.request.params.n
        return [ChatChoice(index, self.shape, self.new_parser(), self.tokenizer) for index in range(count)]

    def usage(self) -> Usage:
        """Counts before the first token."""
        return Usage(self.generation.num_prompt_tokens)

    async def add(self, item: Item, choices: Sequence[ChatChoice], usage: Usage, pace: Pace) -> list[ChatChoice]:
        """Give each choice what is new of it; those that there is something new of, in order."""
        found = []
        for _, delta in item:
            for sequence in delta.sequences:
                choice = choices[sequence.index]
                usage.num_reasoning_tokens -= choice.num_reasoning_tokens
                await choice.add(sequence, pace)
                await pace.did(len(sequence.token_ids))
                usage.num_reasoning_tokens += choice.num_reasoning_tokens
                if self.shape.has_answer:
                    usage.num_completion_tokens += len(sequence.token_ids)
                if choice.finish_reason is not None:
                    self.generation.note_finished(choice.finish_reason)
                found.append(choice)
        return found

    async def of_prompt(self, item: Item, pace: Pace) -> dict[str, Any]:
        """What the answer's first object tells of the prompt besides; `item` is the first one."""
        told: dict[str, Any] = {}
        if self.prompt_logprobs is not None:
            entries = next((delta.prompt_logprobs for _, delta in item if delta.prompt_logprobs is not None), ())
            told["prompt_logprobs"] = await prompt_logprobs(entries, self.prompt_logprobs, pace)
        if self.shape.has_token_ids:
            told["prompt_token_ids"] = list(self.request.token_ids)
        return told


async def whole_chat(work: ChatWork) -> dict[str, Any]:
    """OpenAI's object. Raises ApiError. Cancelling it aborts the work."""
    choices, usage, pace = work.choices(), work.usage(), Pace()
    of_prompt: dict[str, Any] | None = None
    async with aclosing(work.generation.items()) as items:
        async for item in items:
            of_prompt = await work.of_prompt(item, pace) if of_prompt is None else of_prompt
            await work.add(item, choices, usage, pace)
    told = [choice.message() for choice in choices]
    return {**work.head, "choices": told, "usage": usage.document(), **(of_prompt or {})}
