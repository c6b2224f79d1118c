# SPDX-License-Identifier: MIT OR Apache-2.0
"""Asks an ASGI app without a server, byte for byte, and makes apps over models without engines."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from metrale_ray.errors import EngineDead
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front
from metrale_ray.serve.http.app import create_app
from metrale_ray.serve.http.metering import HttpMetrics, NoMetrics
from metrale_ray.serve.http.settings import HttpSettings

WELL = Health(True, "", True, "")
JSON = ("content-type", "application/json")
Header = tuple[str, str]


class NoEngine:
    """A `Backend` whose engine is not there; a test sets its health."""

    def __init__(self, health: Health = WELL) -> None:
        self.now = health

    def front(self) -> Front:
        raise ApiError(503, "there is no engine", code="engine_unavailable")

    def health(self) -> Health:
        return self.now

    def figures(self) -> Mapping[str, Any]:
        return {"phase": "none"}

    async def explain(self, seen: EngineDead) -> EngineDead:
        return seen


def model_of(backend: NoEngine, *names: str) -> ServedModel:
    """A model that has nothing but its backend."""
    return ServedModel(names or ("m",), backend, None, None, GenerationDefaults(), 100, created=5)


def app_of(settings: HttpSettings | None = None, *models: ServedModel, metrics: HttpMetrics | None = None) -> FastAPI:
    """An app; one model that is well where none is given."""
    return create_app(models or (model_of(NoEngine()),), settings or HttpSettings(), metrics or NoMetrics())


@functools.cache
def plain_app() -> FastAPI:
    """One app for all tests that change nothing of it: making one takes a while."""
    return app_of()


@dataclass
class Exchange:
    """What came back. `parts` are the bodies as they were sent; `ended`: whether the last one was."""

    status: int | None = None
    headers: list[Header] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of OpenAI's error object."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["code"])

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode().lower(), value.decode()) for name, value in message["headers"]]
        else:
            assert message["type"] == "http.response.body", message
            assert self.status is not None
            assert not self.ended
            self.parts += [message["body"]] if message.get("body") else []
            self.ended = not message.get("more_body", False)


class Client:
    """What an app receives: the parts of a body, and then nothing until the client leaves."""

    def __init__(self, parts: Iterable[bytes] = (b"",), *, whole: bool = True) -> None:
        parts = list(parts) or [b""]
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": not whole or place < len(parts) - 1}
            for place, part in enumerate(parts)
        ]
        self.left = asyncio.Event()
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            self.num_read += 1
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}


def scope_of(method: str, path: str, headers: Sequence[Header] = (), **changes: Any) -> dict[str, Any]:
    """A request's scope; `path` is decoded already."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        **changes,
    }


async def asked(
    app: Any, method: str, path: str, headers: Sequence[Header] = (), client: Client | None = None, **changes: Any
) -> Exchange:
    """The app's answer to one request."""
    exchange = Exchange()
    await app(scope_of(method, path, headers, **changes), (client or Client()).receive, exchange.send)
    return exchange


def ask(app: Any, method: str, path: str, headers: Sequence[Header] = (), *parts: bytes, **changes: Any) -> Exchange:
    """The same, from outside a loop, with the parts of a body."""

    async def go() -> Exchange:
        return await asked(app, method, path, headers, Client(parts), **changes)

    return asyncio.run(go())
