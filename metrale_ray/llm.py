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
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
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
from metrale_ray.serve.completion import Completion
from metrale_ray.serve.outputs import RequestOutput
from metrale_ray.serve.text import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
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
        self._numbers = itertools.count()
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
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt (text, or token ids) and give the answers in order.

        `sampling_params`: one for all, or one for each. Raises RequestError for a prompt that is none, EngineDead.
        """
        listed = _listed(prompts)
        params = _params(sampling_params, len(listed))
        return self._wait(self._answer_all(listed, params, progress))

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Answer one conversation: messages with "role" and "content", laid out by the checkpoint's chat template."""
        return self.generate([self._chat_ids(messages)], sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt as it grows: each item holds the text so far, and the new part in `outputs[0].delta`."""
        items = self.astream(prompt, sampling_params)
        try:
            while True:
                try:
                    yield self._wait(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if not self._closed:
                self._wait(_close(items))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Like `stream`, for one conversation."""
        return self.stream(self._chat_ids(messages), sampling_params)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Like `stream`, for asyncio. Leaving the loop early aborts the request on every rank."""
        params = sampling_params or SamplingParams()
        token_ids = self._token_ids(prompt)
        request_id = str(next(self._numbers))
        text = prompt if isinstance(prompt, str) else None
        completion = Completion(self.tokenizer, params, token_ids)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids", param="stop"
            )
        try:
            handle = self._client.submit(token_ids, self._with_text_ends(params))
        except EngineDead as seen:
            raise await self._dead(seen) from None
        answered = False
        try:
            while not answered:
                try:
                    output = await handle.aget()
                except EngineDead as seen:
                    answered = True
                    raise await self._dead(seen) from None
                completion.push(output)
                answered = output.finish_reason is not None
                if completion.stopped_by_string and not answered:
                    handle.finish()
                    answered = True
                yield RequestOutput(request_id, text, list(token_ids), [completion.snapshot()], answered)
        finally:
            if not answered:
                handle.abort()

    def stats(self) -> dict[str, Any]:
        """Gauges, counters, and the ranks with their process ids and nodes. Raises EngineDead."""
        if self._closed:
            raise EngineDead("this LLM was closed")
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

    async def _answer_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        # Half of the head's queue: other fronts have room, and no request is refused for the queue's length.
        room = asyncio.Semaphore(max(1, self.config.max_queue_len // 2))
        with counted(len(prompts), "prompts", shown=progress) as advance:

            async def answer(prompt: Prompt, one: SamplingParams) -> RequestOutput:
                async with room:
                    result = await self._last(prompt, one)
                advance()
                return result

            tasks = [asyncio.ensure_future(answer(p, one)) for p, one in zip(prompts, params, strict=True)]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()  # one failed or the caller left: the others abort their requests
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        last: RequestOutput | None = None
        async for item in self.astream(prompt, params):
            last = item
        if last is None:
            raise AssertionError("a stream ended without an answer")
        return last

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this checkpoint has no tokenizer files: give token ids instead of text", param="prompt"
                )
            return tuple(self.tokenizer.encode(prompt))
        return tuple(prompt)

    def _with_text_ends(self, params: SamplingParams) -> SamplingParams:
        """The tokenizer's own end-of-sequence tokens end a text too: not every checkpoint's configuration has them."""
        if self.tokenizer is None or params.ignore_eos:
            return params
        ends = {*params.stop_token_ids, *self.tokenizer.eos_token_ids}
        return dataclasses.replace(params, stop_token_ids=tuple(sorted(ends)))

    def _chat_ids(self, messages: Messages) -> list[int]:
        if self.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files, so it cannot chat; use generate with token ids")
        if not _is_sequence(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('messages must be a list of {"role": ..., "content": ...}', param="messages")
        return self.tokenizer.chat(messages)


def _config(model: str | EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if settings:
            raise ConfigError(f"settings {', '.join(settings)} were given beside a whole EngineConfig; put them in it")
        return model
    return from_mapping(settings if model is None else {"model": model, **settings})


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a text, or a flat list of token ids, is one. Raises RequestError."""
    if isinstance(prompts, str) or (_is_sequence(prompts) and _are_ids(prompts)):
        return [prompts]  # type: ignore[list-item]  # just seen to be one prompt
    if not _is_sequence(prompts):
        raise _no_prompt(prompts)
    for prompt in prompts:
        if not isinstance(prompt, str) and not (_is_sequence(prompt) and (not prompt or _are_ids(prompt))):
            raise _no_prompt(prompt)
    return list(prompts)  # type: ignore[arg-type]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_ids(values: Any) -> bool:
    return bool(values) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _no_prompt(given: object) -> RequestError:
    shown = repr(given) if len(repr(given)) < 80 else f"{repr(given)[:80]}..."
    return RequestError(f"{shown} is no prompt: give a text, a list of token ids, or a list of these", param="prompt")


def _params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} sampling parameters for {count} prompts; give one for all, or one for each")
    return list(given)


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


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _close(items: AsyncIterator[Any]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()
