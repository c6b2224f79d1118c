# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Generation`: what the engine makes for one call, counted, and every failure of it as one that HTTP can tell.

Rules. A failure of one sequence ends the call: what came with it is given first, then it is raised. Closing it aborts
all sequences of all prompts in the engine. Each sequence is counted as ended once.

What it leaves out: what the tokens mean for the client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from metrale_ray.errors import EngineDead, MetraleError
from metrale_ray.protocol.front.messages import MAX_TIMEOUT_S
from metrale_ray.serve.deltas import Delta, SequenceDelta
from metrale_ray.serve.failures import ApiError, of_error, of_output
from metrale_ray.serve.front import Front
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.prompts import PromptRequest

Item = list[tuple[int, Delta]]
"""All that is new at once: the number of a prompt, and what is new of its answers."""


class Generation:
    """The work of one call. Nothing is sent before `items` is read.

    `form`: the client's field that the output's form comes from, if it has one.
    """

    def __init__(self, call: Call, front: Front, requests: Sequence[PromptRequest], form: str | None = None) -> None:
        self.requests = requests
        self._form = form
        self._call = call
        self._front = front
        self._num_live = sum(request.params.n for request in requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(len(request.token_ids) for request in self.requests)

    async def items(self) -> AsyncGenerator[Item, None]:
        """What is new, as it comes, until all has ended. Raises ApiError."""
        self._call.meter.prompt(self.num_prompt_tokens)
        try:
            async with aclosing(self._front.deltas_of_all(self.requests)) as items:
                async for item in items:
                    failure = self._note(item)
                    if failure is None:
                        yield item
                        continue
                    rest = _without_failures(item)
                    if rest:
                        yield rest
                    raise failure
        except EngineDead as error:
            raise of_error(await self._call.model.backend.explain(error)) from error
        except MetraleError as error:
            raise of_error(error) from error
        finally:
            for _ in range(self._num_live):
                self._call.meter.finished("abort")

    def note_finished(self, reason: str) -> None:
        """One sequence has ended by itself, for this reason."""
        self._call.meter.finished(reason)

    def _note(self, item: Item) -> ApiError | None:
        """Count what came; the first failure in it."""
        sequences = list(_sequences(item))
        count = sum(len(sequence.token_ids) for sequence in sequences)
        if count:
            self._call.meter.tokens(count)
        failure = None
        for sequence in sequences:
            self._num_live -= sequence.finish_reason is not None
            found = _failure(sequence, self._form)
            if found is not None:
                self._call.meter.finished("error" if sequence.finish_reason == "error" else "abort")
                failure = failure or found
        return failure


def timeout_s(call: Call) -> float:
    """How long the head lets one request take."""
    return min(call.settings.limits.max_request_s, MAX_TIMEOUT_S)


def _sequences(item: Item) -> Iterable[SequenceDelta]:
    return (sequence for _, delta in item for sequence in delta.sequences)


def _failure(sequence: SequenceDelta, form: str | None = None) -> ApiError | None:
    if sequence.finish_reason == "error":
        return of_output(sequence.error_code or "error", sequence.error or "the engine gave no reason", form=form)
    if sequence.finish_reason == "abort":
        return ApiError(503, "the service ended this request before it was whole", code="aborted")
    return None


def _without_failures(item: Item) -> Item:
    """What came with a failure or before it."""
    found: Item = []
    for number, delta in item:
        sequences = [
            sequence if _failure(sequence) is None else dataclasses.replace(sequence, finish_reason=None)
            for sequence in delta.sequences
        ]
        told = [sequence for sequence in sequences if not sequence.is_empty]
        if told:
            found.append((number, dataclasses.replace(delta, sequences=told)))
    return found
