# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LLM`: the Python driver. It starts an engine on Ray, turns text into token ids and back, and streams.

    with LLM(model="path/to/checkpoint", ep_size=2) as llm:
        for out in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.outputs[0].text)

Rules: tokens come over the front's own socket, never through a Ray call. Every call ends: with an answer, or with
EngineDead naming the rank and the reason. A failed request is an answer too (finish reason "error").
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from metrale_ray.cluster import Cluster
from metrale_ray.config import EngineConfig, from_mapping
from metrale_ray.errors import ConfigError, EngineDead, RequestError, StartError, UserError
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.weights import plan_weights, read_decoder_config
from metrale_ray.progress import LoadProgress, counted
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.outputs import RequestOutput
from metrale_ray.serve.prompts import Prompt, PromptRequest
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from metrale_ray.serve.turns import Turns

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")

# How often the driver asks Ray whether a rank has ended; the front's own session usually knows first.
WATCH_S = 1.0
# How long a call that saw the engine die waits for the reason that Ray has, before it raises what it saw.
WHY_S = 2.5
# The head is ready and on the same network: it opens a session at once.
OPEN_TIMEOUT_S = 30.0


class LLM:
    """An engine and its driver. `model` is a checkpoint folder, a hub id, or a whole EngineConfig.

    Settings are EngineConfig's fields. Raises ConfigError, CheckpointError, StartError and their kinds; nothing is
    left running then. Close it, or use it in a `with` statement.
    """

    def __init__(self, model: str | EngineConfig | None = None, **settings: Any) -> None:
        self.config = _config(model, settings).resolved()
        self._closed = False
        self._lock = threading.Lock()  # between a call that begins and `close`
        self._why = threading.Event()  # the watch knows why the engine has ended
        self._death: EngineDead | None = None
        checkpoint = open_checkpoint(self.config.model, self.config.revision)
        decoder = read_decoder_config(checkpoint)
        plan_weights(checkpoint, decoder, 0, self.config.ep_size)  # refuse before Ray starts
        # Tokens of one sequence, prompt and answer.
        self.max_model_len = self.config.max_model_len or decoder.max_positions
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.path)
        self._cluster = Cluster(self.config)
        with LoadProgress(self.config.ep_size) as progress:
            self._cluster.start(progress.update)
        try:
            self._client = _connect(self._cluster.front_address, self._cluster.front_keys, self._cluster.head_key)
            # Half of the head's queue: other fronts have room, and no request is refused for the queue's length.
            self._front = Front(self._client, self.tokenizer, max_waiting=max(1, self.config.max_queue_len // 2))
        except BaseException:
            self._cluster.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True),
            threading.Thread(target=self._watch, name="llm-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a script that forgets to; Ray's own end comes after this

    def __enter__(self) -> LLM:
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
        return self._read(self._all(requests, progress))

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
        prompt = self._chat_ids(messages)
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
        self._check_open()
        return self._read(self._stream(self._one(prompt, sampling_params, priority, timeout_s)))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `stream`, for one conversation."""
        return self.stream(self._chat_ids(messages), sampling_params, priority=priority, timeout_s=timeout_s)

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `stream`, for asyncio."""
        self._check_open()
        async with aclosing(self._stream(self._one(prompt, sampling_params, priority, timeout_s))) as items:
            async for item in items:
                yield item

    def stats(self) -> dict[str, Any]:
        """Gauges, counters, and the ranks with their process ids and nodes. Raises EngineDead."""
        self._check_open()
        if self._client.death is not None:
            raise self._death or self._client.death
        return self._cluster.stats()

    def close(self) -> None:
        """End the engine and everything started for it. May be called twice."""
        atexit.unregister(self.close)
        with self._lock:
            first, self._closed = not self._closed, True
        with contextlib.ExitStack() as closing:  # each step is taken whatever happens in those before it
            closing.callback(self._cluster.close)
            if first:
                closing.callback(self._end_threads)
            closing.callback(self._cluster.stop)  # the ranks end, and with them the watch
            closing.callback(self._client.close)

    def _end_threads(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    def _watch(self) -> None:
        """Wait for a rank to end: Ray knows the reason that a worker gave, which the head may not."""
        while not self._closed:
            death = self._cluster.wait_ended(WATCH_S)
            if death is not None and not self._closed:
                self._death = death
                self._why.set()
                self._client.die(death.message, death.rank)
                return

    async def _dead(self, seen: EngineDead) -> EngineDead:
        """The death as it is told to the caller: what the front saw, or, soon after, what Ray knows of its rank."""
        if not self._closed:
            await asyncio.to_thread(self._why.wait, WHY_S)
        known = self._death
        if known is None or (seen.rank is not None and known.rank != seen.rank):
            return seen
        return EngineDead(known.message, rank=known.rank)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM was closed")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                work.close()
                raise EngineDead("this LLM was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: the coroutine's own clean-up aborts what runs
            raise

    def _read(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """The items of the loop's thread, in the caller's."""
        turns = Turns(items)
        try:
            while True:
                try:
                    yield self._wait(turns.next())
                except StopAsyncIteration:
                    return
        finally:
            if not self._closed:
                self._wait(turns.close())

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

    def _one(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, timeout_s: float | None
    ) -> PromptRequest:
        """The request of one prompt. Raises RequestError."""
        requests = self._front.prepare.requests(prompt, params, priority, timeout_s)
        if len(requests) != 1:
            raise RequestError(
                f"{len(requests)} prompts were given and one can be streamed; give a text, or a list of token ids",
                param="prompt",
            )
        return requests[0]

    def _chat_ids(self, messages: Messages) -> list[int]:
        if self.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files, so it cannot chat; use generate with token ids")
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('messages must be a list of {"role": ..., "content": ...}', param="messages")
        return self.tokenizer.chat(messages)


def _config(model: str | EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if settings:
            raise ConfigError(f"settings {', '.join(settings)} were given beside a whole EngineConfig; put them in it")
        return model
    return from_mapping(settings if model is None else {"model": model, **settings})


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


async def _cancel_all() -> None:
    """End every task of this loop but this one, and wait for their clean-up."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
