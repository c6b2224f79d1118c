# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Answer`: the work of one request, and the sending of what comes of it, whole or as a stream of events.

Rules. Nothing is sent before there is something: a request that is refused by the engine gets its own status. What
fails later in a stream is an event with the error, and the end. The client's leaving, the limit of time and the end of
the service cancel the work wherever it is (see `span`), and all that it has in the engine goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from metrale_ray.serve.http.drain import LAST_WORDS_S, Drain
from metrale_ray.serve.http.errors import CLIENT_GONE_STATUS, api_error
from metrale_ray.serve.http.span import Span
from metrale_ray.serve.http.visit import visit_of
from metrale_ray.serve.openai.events import error_event
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.written import written

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""A proxy that keeps events back until there are many makes a stream worthless."""


class Whole(Protocol):
    """A request that is checked and prepared, of which nothing runs yet."""

    async def whole(self) -> Mapping[str, Any]:
        """The answer."""
        ...


@runtime_checkable
class Started(Whole, Protocol):
    """One whose answer may be a stream too."""

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream; a refusal of the engine is raised by the first."""
        ...


class Answer(Response):
    """What a route returns. `start` checks and prepares; `headers` go with an answer that is no error.

    With `streams` it is to give a `Started`.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Whole]],
        drain: Drain,
        *,
        streams: bool,
        max_request_s: float,
        headers: Mapping[str, str],
    ) -> None:
        media_type = "text/event-stream" if streams else "application/json"
        super().__init__(None, 200, {**headers, **(STREAM_HEADERS if streams else {})}, media_type)
        del self.headers["content-length"]  # it is not known yet
        self._start = start
        self._drain = drain
        self._streams = streams
        self._max_request_s = max_request_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work and answer. Raises what failed before the answer began."""
        span = Span(receive, self._max_request_s)
        with self._drain.admitted(span):
            try:
                body = await self._work(span, send)
            except Exception as error:
                if not self._has_begun:
                    raise
                await self._tell(error, scope, send)
            else:
                await self._send_last(body, send)

    async def _work(self, span: Span, send: Send) -> bytes:
        """Everything up to the last bytes, which are returned. Those are sent when nobody watches any more."""
        async with span:
            started = await self._start()
            if not self._streams:
                return await written(await started.whole(), Pace())
            assert isinstance(started, Started)  # whoever wants a stream starts one
            async with aclosing(started.chunks()) as chunks:
                async for chunk in chunks:
                    await self._send_part(chunk, send)
        return b""

    async def _send_part(self, chunk: bytes, send: Send) -> None:
        await self._begin(send)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _send_last(self, body: bytes, send: Send) -> None:
        if not self._streams:
            self.headers["content-length"] = str(len(body))
        await self._begin(send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _tell(self, error: Exception, scope: Scope, send: Send) -> None:
        """The last event of a stream that failed. Whoever does not read it in time is left alone."""
        visit = visit_of(scope)
        failure = api_error(error, visit.request_id)
        visit.error_code = failure.code
        if failure.status == CLIENT_GONE_STATUS:
            visit.status = failure.status
            return
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._send_last(error_event(failure), send)
        except TimeoutError:
            visit.status = CLIENT_GONE_STATUS
