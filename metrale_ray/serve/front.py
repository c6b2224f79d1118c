# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Front`: one engine as its user asks it: prompts in, answers with text out. Everything here is asyncio.

Rules. A request that nobody waits for any more is aborted. Items of a stream hold everything that has arrived, however
slowly they are taken: the whole answers so far (`stream`), or only what is new (`deltas`). Answers to many prompts come
in the order of the prompts (`all`), or what is new of each as it comes (`deltas_of_all`); they are sent in order of
priority, and at most `max_waiting` sequences and a number of prompt tokens at a time, so that no request of one call is
refused because the head's queue is full.

What it leaves out: what is legal (`prompts`), where the engine comes from and why it died (`llm`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from metrale_ray.protocol.front import FrontClient, Output, RequestHandle
from metrale_ray.serve.answers import Answers
from metrale_ray.serve.deltas import Delta
from metrale_ray.serve.merge import merged
from metrale_ray.serve.outputs import RequestOutput
from metrale_ray.serve.prompts import Preparation, PromptRequest
from metrale_ray.serve.room import Room
from metrale_ray.serve.text import Tokenizer

# Half of the prompt tokens that the head lets wait.
MAX_PROMPT_TOKENS_ON_THE_WAY = 2**24
TOKENS_PER_PLACE = 1024  # places are counted one by one


class Front:
    """`client` has an open session. `prepare` is what makes requests of prompts."""

    def __init__(self, client: FrontClient, tokenizer: Tokenizer | None, *, max_waiting: int) -> None:
        self.prepare = Preparation(tokenizer, client.wait_opened(0))
        self._client = client
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._numbers = itertools.count()

    async def stream(self, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
        """The answers as they grow, the last item with `finished`. Raises EngineDead. Closing it aborts the request."""
        async with aclosing(self._growing(request)) as stages:
            async for answers in stages:
                yield answers.snapshot()

    async def deltas(self, request: PromptRequest) -> AsyncGenerator[Delta, None]:
        """What is new of the answers, as it comes, the last item with `finished`. Otherwise like `stream`."""
        async with aclosing(self._growing(request)) as stages:
            async for answers in stages:
                delta = answers.delta()
                if delta.sequences:  # not only what came behind a stop string
                    yield delta

    async def deltas_of_all(self, requests: Sequence[PromptRequest]) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """The deltas of several requests: each item has all that is there, as (number of the request, its delta).

        Sequences and prompt tokens are bounded as in `all`. Raises EngineDead; closing it aborts what still runs.
        """
        if len(requests) == 1:  # the usual case needs no tasks
            async with aclosing(self.deltas(requests[0])) as deltas:
                async for delta in deltas:
                    yield [(0, delta)]
            return
        rooms = self._rooms()
        async with aclosing(merged([self._deltas_in_room(request, *rooms) for request in requests])) as items:
            async for item in items:
                yield item

    async def _deltas_in_room(
        self, request: PromptRequest, room: Room, token_room: Room
    ) -> AsyncGenerator[Delta, None]:
        places = len(request.token_ids) // TOKENS_PER_PLACE
        async with room.places(request.params.n), token_room.places(places), aclosing(self.deltas(request)) as deltas:
            async for delta in deltas:
                yield delta

    def _rooms(self) -> tuple[Room, Room]:
        """Places for the sequences and for the prompt tokens of one call."""
        return Room(self._max_waiting), Room(MAX_PROMPT_TOKENS_ON_THE_WAY // TOKENS_PER_PLACE)

    async def all(
        self, requests: Sequence[PromptRequest], on_answer: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The whole answer to each, in order, each as soon as it and all before it are there.

        `on_answer` is called whenever one is complete. Raises EngineDead; closing it aborts what still runs.
        """
        room, token_room = self._rooms()

        async def answer(request: PromptRequest) -> RequestOutput:
            num_token_places = len(request.token_ids) // TOKENS_PER_PLACE
            async with room.places(request.params.n), token_room.places(num_token_places):
                result = await self._whole(request)
            on_answer()
            return result

        first_to_last = sorted(range(len(requests)), key=lambda index: requests[index].priority)
        tasks = {index: asyncio.ensure_future(answer(requests[index])) for index in first_to_last}
        try:
            for index in range(len(requests)):
                yield await tasks.pop(index)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _whole(self, request: PromptRequest) -> RequestOutput:
        async with aclosing(self._growing(request)) as stages:
            async for answers in stages:
                if answers.finished:
                    return answers.snapshot()
        raise AssertionError("a request ended without an answer")

    async def _growing(self, request: PromptRequest) -> AsyncGenerator[Answers, None]:
        """The answers after each thing that arrived."""
        answers = Answers(str(next(self._numbers)), request, self._tokenizer)
        if request.refusal is not None:
            answers.refuse(*request.refusal)
            yield answers
            return
        handle = self._client.submit(
            request.token_ids, request.sent, priority=request.priority, timeout_s=request.timeout_s
        )
        try:
            while not answers.finished:
                _take(await handle.aget(), answers, handle)
                for output in handle.ready():  # one step gives each of a request's sequences an output
                    _take(output, answers, handle)
                if answers.has_news:
                    yield answers
        finally:
            if not answers.finished:
                handle.abort()


def _take(output: Output, answers: Answers, handle: RequestHandle) -> None:
    if answers.push(output):
        handle.finish(output.index)
