# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LLM`: the Python driver. It starts an engine on Ray, turns text into token ids and back, and streams.

    with LLM(model="path/to/checkpoint", ep_size=2) as llm:
        for out in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16)):
            print(out.outputs[0].text)

Rules: tokens come over the front's own socket, never through a Ray call. Every call ends: with an answer, or with
EngineDead naming the rank and the reason. A failed request is an answer too (finish reason "error").
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import TracebackType
from typing import Any

import ray

from metrale_ray.cluster import Cluster
from metrale_ray.config import EngineConfig, from_mapping
from metrale_ray.errors import ConfigError, EngineDead, RequestError, StartError, UserError
from metrale_ray.model_files import open_model
from metrale_ray.progress import LoadProgress, counted
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.loop_thread import LoopThread
from metrale_ray.serve.outputs import RequestOutput
from metrale_ray.serve.prompts import Prompt, PromptRequest
from metrale_ray.serve.text import Tokenizer
from metrale_ray.serve.watch import WHY_S, Watch

Messages = Sequence[Mapping[str, Any]]
CLOSED = "this LLM was closed"
# The head is ready and on the same network: it opens a session at once.
OPEN_TIMEOUT_S = 30.0


class LLM:
    """An engine and its driver. `model` is a checkpoint folder, a hub id, or a whole EngineConfig.

    Settings are EngineConfig's fields. A process is in one Ray at a time: where it has joined one already, that one is
    used. Raises ConfigError, CheckpointError, StartError and their kinds; nothing is
    left running then. Close it, or use it in a `with` statement.
    """

    def __init__(self, model: str | EngineConfig | None = None, **settings: Any) -> None:
        config = _config(model, settings)
        _check_address(config.address)  # the one in the environment is for whoever starts Ray
        self.config = config.resolved()
        self._is_closed = False
        self._closing = threading.RLock()  # one thread at a time; a signal's handler may close in the middle of it
        self._steps = contextlib.ExitStack()  # how to end what was started, the last first, each whatever happens
        files = open_model(self.config)  # refuse before Ray starts
        self.max_model_len = files.max_model_len  # tokens of one sequence, prompt and answer
        self.tokenizer: Tokenizer | None = files.tokenizer
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start everything; each thing's end is noted before it begins, as an interrupt may come at any moment."""
        self._cluster = Cluster(self.config)
        self._steps.callback(self._cluster.close)
        with LoadProgress(self.config.ep_size) as progress:
            self._cluster.start(progress.update)
        self._watch = Watch(self._cluster.wait_ended, lambda death: self._client.die(death.message, death.rank))
        self._steps.callback(self._watch.join)
        self._steps.callback(self._cluster.stop)  # the ranks end, and with them the watch
        self._loop = LoopThread("llm-loop", CLOSED)
        self._steps.callback(self._loop.close)
        self._loop.start()
        self._open_front()
        self._steps.callback(self._watch.stop)
        self._watch.start()
        self._steps.callback(atexit.unregister, self.close)
        atexit.register(self.close)  # a script that forgets to; Ray's own end comes after this

    def _open_front(self) -> None:
        try:
            self._client = _connect(self._cluster.front_address, self._cluster.front_keys, self._cluster.head_key)
            self._steps.callback(self._client.close)
            # Half of the head's queue: other fronts have room, and no request is refused for the queue's length.
            self._front = Front(self._client, self.tokenizer, max_waiting=max(1, self.config.max_queue_len // 2))
        except EngineDead as seen:
            known = self._cluster.wait_ended(WHY_S) or seen
            raise StartError(f"the engine ended as soon as it was ready: {known.message}", rank=known.rank) from seen

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
        return self._loop.read(self._stream(self._one(prompt, sampling_params, priority, timeout_s)))

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
            raise self._watch.death or self._client.death
        return self._cluster.stats()

    def close(self) -> None:
        """End the engine and all that was started for it; who waits gets EngineDead. May be called twice."""
        self._is_closed = True
        with self._closing:
            self._steps.close()

    async def _dead(self, seen: EngineDead) -> EngineDead:
        """The death as it is told to the caller: one that comes of closing is no finding."""
        known = seen if self._is_closed else await self._watch.explain(seen)
        return EngineDead(CLOSED) if self._is_closed else known

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDead(CLOSED)

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


def _check_address(asked: str | None) -> None:
    """Refuse an address other than that of the Ray which this process has joined already, where both are known."""
    if asked is None or not ray.is_initialized():
        return
    joined = str(getattr(ray.get_runtime_context(), "gcs_address", ""))  # a client of Ray does not know it
    here, there = _host_and_port(joined), _host_and_port(asked)
    if here is None or there is None or here == there:
        return
    # A node is reached by its loopback address too.
    if here[1] == there[1] and (here[0].is_loopback or there[0].is_loopback):
        return
    raise ConfigError(
        f"address is {asked!r}, and this process has joined the Ray at {joined!r}; leave address out to use that one, "
        "or call ray.shutdown() before"
    )


def _host_and_port(address: str) -> tuple[IPv4Address | IPv6Address, int] | None:
    """Of an address in numbers; None for a name, which may be that of any host."""
    host, _, port = address.rpartition(":")
    try:
        return ip_address(host.strip("[]")), int(port)
    except ValueError:
        return None


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
