# SPDX-License-Identifier: MIT OR Apache-2.0
"""A live service in this process, without Ray: head and workers as threads, uvicorn on a thread and a free port.

The model is SUCC: greedy output counts up, token t is followed by t + 1, so that every answer can be checked.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front
from metrale_ray.serve.http.app import create_app
from metrale_ray.serve.http.drain import Drain
from metrale_ray.serve.http.metering import HttpMetrics, NoMetrics
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.structured import GrammarChecks
from metrale_ray.serve.templates.load import load_template
from metrale_ray.serve.templates.renderer import Renderer
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from metrale_ray.service.server import listen
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE
from tests.fixtures.tokenizer import write_tokenizer
from tests.test_head import TIMEOUT_S, Process, running, until

T = TypeVar("T")

MODEL_NAME = "succ"
MAX_MODEL_LEN = 4000
HOST = "127.0.0.1"
PROBE_LEN = 8


class RigBackend:
    """A `Backend` over one session. `reason`: why the engine is not ready, set by a test; "" while it is."""

    def __init__(self, client: FrontClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._front = Front(client, tokenizer, max_waiting=1000)
        self.reason = ""

    def front(self) -> Front:
        reason = self._reason()
        if reason:
            raise ApiError(503, reason, code="engine_unavailable")
        return self._front

    def health(self) -> Health:
        reason = self._reason()
        return Health(not reason, reason, True, "")

    def figures(self) -> Mapping[str, Any]:
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        return seen

    def _reason(self) -> str:
        death = self._client.death
        return self.reason if death is None else death.message


class HttpThread:
    """An ASGI app behind uvicorn on a loop of its own thread. `url` has no slash at its end."""

    def __init__(self, app: Any) -> None:
        self._listener = listen(HOST, 0)
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
        self._server = _Server(config)
        make_loop = config.get_loop_factory()
        self._loop = asyncio.new_event_loop() if make_loop is None else make_loop()
        self._thread = threading.Thread(target=self._run, name="rig-http", daemon=True)
        self._thread.start()
        assert self._server.is_up.wait(TIMEOUT_S)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let `work` run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives on the server's loop."""
        return self.begin(work).result(TIMEOUT_S)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            self._loop.close()
            self._listener.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class ServiceRig:
    """A service that runs. `client` talks to it with its first API key, if it has one."""

    def __init__(
        self,
        process: Process,
        backend: RigBackend,
        template: Renderer,
        grammars: GrammarChecks,
        app: FastAPI,
        api_key: str | None,
    ) -> None:
        self.process = process
        self.backend = backend
        self._template = template
        self._grammars = grammars
        self.app = app
        self.server = HttpThread(app)
        self.url = self.server.url
        self.api_key = api_key
        self.client = self.new_client()
        self._probes = itertools.count(1)

    @property
    def drain(self) -> Drain:
        drain = self.app.state.drain
        assert isinstance(drain, Drain)
        return drain

    def new_client(self) -> httpx.Client:
        """One more client, with a connection of its own."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def stats(self) -> dict[str, Any]:
        """The engine's own numbers."""
        found: dict[str, Any] = self.process.call(self.process.head.stats())
        return found

    def wait_idle(self) -> None:
        """Wait until nothing runs or waits in the engine, and every block is free."""

        def is_idle() -> bool:
            stats = self.stats()
            return (stats["running"], stats["waiting"]) == (0, 0) and stats["free_blocks"] == stats["total_blocks"]

        until(is_idle)

    def live_probe(self) -> None:
        """A normal request is answered, and right: each probe another part of the chain."""
        first = next(self._probes) * 7 % (VOCAB_SIZE - PROBE_LEN - 1)
        body = {"model": MODEL_NAME, "prompt": [first], "max_tokens": PROBE_LEN, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["token_ids"] == list(range(first + 1, first + 1 + PROBE_LEN))

    def close(self) -> None:
        async def close_cells() -> None:
            self._template.close()
            self._grammars.close()

        self.client.close()
        self.server.call(close_cells())
        self.server.close()


def write_model(folder: Path, **changes: Any) -> Path:
    """SUCC with a tokenizer and a chat template."""
    write_succ(folder, **changes)
    return write_tokenizer(folder)


@contextmanager
def serving(
    model: Path,
    ep_size: int = 1,
    *,
    settings: HttpSettings | None = None,
    metrics: HttpMetrics | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    chat_template: Path | None = None,
    **engine: Any,
) -> Iterator[ServiceRig]:
    """A service over `model` (see `write_model`); `engine` are settings of EngineConfig."""
    settings = settings or HttpSettings()
    tokenizer = load_tokenizer(model)
    with running(model, ep_size, **{"max_model_len": MAX_MODEL_LEN, **engine}) as (process, client):
        backend = RigBackend(client, tokenizer)
        template = load_template(tokenizer, chat_template, settings.api.limits)
        grammars = GrammarChecks(settings.api.limits)
        served = ServedModel(
            names=(MODEL_NAME,),
            backend=backend,
            tokenizer=tokenizer,
            template=template,
            defaults=GenerationDefaults(),
            max_model_len=process.config.max_model_len or MAX_MODEL_LEN,
            created=0,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            grammars=grammars,
        )
        app = create_app([served], settings, metrics or NoMetrics())
        rig = ServiceRig(process, backend, template, grammars, app, next(iter(settings.api_keys), None))
        try:
            yield rig
        finally:
            rig.close()
