# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Driver`: what a Python program asks of an engine, whoever started it: texts in, answers out, whole or as they grow.

Rules: tokens come over the front's own socket, never through a Ray call. Every call ends: with an answer, or with
EngineDead naming the rank and the reason. A failed request is an answer too (finish reason "error"). Each thing's end
is noted before it begins, as an interrupt may come at any moment, and whatever broke, `close` leaves nothing.

Leaves out: where the engine comes from. `llm` starts one, and `attached` finds one that runs.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from metrale_ray.errors import EngineDead, RequestError, StartError, UserError
from metrale_ray.progress import counted
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.loop_thread import LoopThread
from metrale_ray.serve.outputs import RequestOutput
from metrale_ray.serve.prompts import Prompt, PromptRequest
from metrale_ray.serve.session_backend import SessionBackend
from metrale_ray.serve.text import Tokenizer
from metrale_ray.serve.watch import WHY_S, Watch

Messages = Sequence[Mapping[str, Any]]
# The head is ready and on the same network: it opens a session at once.
OPEN_TIMEOUT_S = 30.0


class Engine(Protocol):
    """An engine that is ready, as a driver sees it. `front_keys` are the driver's own, which the head allows."""

    @property
    def front_address(self) -> str: ...
    @property
    def front_keys(self) -> KeyPair: ...
    @property
    def head_key(self) -> str: ...

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        """Wait up to `timeout_s` for its end, and say why it has ended; None while it runs."""
        ...

    def stats(self) -> dict[str, Any]:
        """Its gauges, counters and ranks. Raises EngineDead."""
        ...

    def stop(self) -> None:
        """The driver leaves: whoever waits for its end need not wait any more."""
        ...


class Driver:
    """A session with an engine. `closed`: what is told to whoever asks after `close`.

    `model_path` is the checkpoint's folder; `tokenizer` is None for one without; `max_model_len` is in tokens of one
    sequence, prompt and answer.
    """

    def __init__(self, closed: str) -> None:
        self.model_path = Path()
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = 0
        self._closed = closed
        self._is_closed = False
        self._closing = threading.RLock()  # one thread at a time; a signal's handler may close in the middle of it
        self._steps = contextlib.ExitStack()  # how to end what was started, the last first, each whatever happens

    def _open(self, engine: Engine, max_queue_len: int) -> None:
        """Begin the session. Raises StartError when the engine ended meanwhile or does not answer."""
        self._engine = engine
        self._watch = Watch(engine.wait_ended, lambda death: self._client.die(death.message, death.rank))
        self._steps.callback(self._watch.join)
        self._steps.callback(engine.stop)  # and with it the watch
        self._loop = LoopThread("llm-loop", self._closed)
        self._steps.callback(self._loop.close)
        self._loop.start()
        self._open_front(engine, max_queue_len)
        self._steps.callback(self._watch.stop)
        self._watch.start()
        self._steps.callback(atexit.unregister, self.close)
        atexit.register(self.close)  # a script that forgets to; Ray's own end comes after this

    def _open_front(self, engine: Engine, max_queue_len: int) -> None:
        try:
            self._client = _connect(engine.front_address, engine.front_keys, engine.head_key)
            self._steps.callback(self._client.close)
            # Half of the head's queue: other fronts have room, and no request is refused for the queue's length.
            self._front = Front(self._client, self.tokenizer, max_waiting=max(1, max_queue_len // 2))
        except EngineDead as seen:
            known = engine.wait_ended(WHY_S) or seen
            raise StartError(f"the engine ended as soon as it was ready: {known.message}", rank=known.rank) from seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout_s: float | Sequence[float | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt (text, or token ids) and give the answers in order.

        `sampling_params`, `priority` (the lower goes first) and `timeout_s` (from when the head takes the request): one
        for all, or one for each. Raises EngineDead, and RequestError for what is no prompt or parameter, before
        anything is sent; it names the prompt's index. A prompt that is too long is answered with an error.
        """
        each = self.generate_each(prompts, sampling_params, priority=priority, timeout_s=timeout_s, progress=progress)
        return list(each)

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout_s: float | Sequence[float | None] | None = None,
        progress: bool = True,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but give each answer as soon as it and all before it are there."""
        self._check_open()
        requests = self._front.prepare.requests(prompts, sampling_params, priority, timeout_s)
        return self._loop.read(self._all(requests, progress))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation: messages with "role" and "content", laid out by the checkpoint's chat template."""
        prompt = self.chat_ids(messages)
        return self.generate([prompt], sampling_params, priority=priority, timeout_s=timeout_s, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt as it grows: each item holds all n answers so far, and what is new of each in `delta`.

        Leaving the loop early aborts the request on every rank.
        """
        request = self.request(prompt, sampling_params, priority=priority, timeout_s=timeout_s)
        return self._loop.read(self._stream(request))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `stream`, for one conversation."""
        return self.stream(self.chat_ids(messages), sampling_params, priority=priority, timeout_s=timeout_s)

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `stream`, for asyncio."""
        request = self.request(prompt, sampling_params, priority=priority, timeout_s=timeout_s)
        async with aclosing(self._stream(request)) as items:
            async for item in items:
                yield item

    def request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> PromptRequest:
        """One prompt, checked and not sent yet; see `answer`. Raises EngineDead, RequestError."""
        self._check_open()
        requests = self._front.prepare.requests(prompt, sampling_params, priority, timeout_s)
        if len(requests) != 1:
            raise RequestError(
                f"{len(requests)} prompts were given and one can be streamed; give a text, or a list of token ids",
                param="prompt",
            )
        return requests[0]

    async def answer(self, request: PromptRequest) -> RequestOutput:
        """The whole answer to one request; for asyncio, any number at once. Raises EngineDead."""
        self._check_open()
        try:
            async with aclosing(self._front.all([request])) as items:
                return await anext(items)
        except EngineDead as seen:
            raise await self._dead(seen) from None

    def chat_ids(self, messages: Messages) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. Raises UserError and RequestError."""
        if self.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files, so it cannot chat; use generate with token ids")
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('messages must be a list of {"role": ..., "content": ...}', param="messages")
        return self.tokenizer.chat(messages)

    def backend(self) -> SessionBackend:
        """The engine as the code of a service asks it. Raises EngineDead."""
        self._check_open()
        return SessionBackend(self._client, self._front, self._dead)

    def stats(self) -> dict[str, Any]:
        """Gauges, counters, and the ranks with their process ids and nodes. Raises EngineDead."""
        self._check_open()
        if self._client.death is not None:
            raise self._watch.death or self._client.death
        return self._engine.stats()

    def close(self) -> None:
        """End what was started for this; who waits gets EngineDead. May be called twice."""
        self._is_closed = True
        with self._closing:
            self._steps.close()

    async def _dead(self, seen: EngineDead) -> EngineDead:
        """The death as it is told to the caller: one that comes of closing is no finding."""
        known = seen if self._is_closed else await self._watch.explain(seen)
        return EngineDead(self._closed) if self._is_closed else known

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDead(self._closed)

    async def _all(self, requests: Sequence[PromptRequest], progress: bool) -> AsyncGenerator[RequestOutput, None]:
        with counted(len(requests), "prompts", shown=progress) as advance:
            async with aclosing(self._front.all(requests, advance)) as items:
                try:
                    async for item in items:
                        yield item
                except EngineDead as seen:
                    raise await self._dead(seen) from None

    async def _stream(self, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(self._front.stream(request)) as items:
            try:
                async for item in items:
                    yield item
            except EngineDead as seen:
                raise await self._dead(seen) from None


def _connect(address: str, keys: KeyPair, head_key: str) -> FrontClient:
    client = FrontClient(address, keys, head_key)
    try:
        client.wait_opened(OPEN_TIMEOUT_S)
    except BaseException as error:
        client.close()
        if isinstance(error, TimeoutError):
            raise StartError(f"the head at {address} did not open a session: {error}") from error
        raise
    return client
