# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Span`: the time in which a request is worked on. It ends early when its client goes, its time is up, or by `end`.

Rules: the body has been read before, so that the next thing to be received is the client's leaving. Whatever ends a
span early cancels the work inside it, whose clean-up ends it in the engine too, and is raised as an ApiError behind
the clean-up. A cancellation from outside stays one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.errors import client_gone


class Span:
    """`async with Span(receive, timeout_s):` around the work. `timeout_s`: how long it may take in all."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._limit = asyncio.timeout(timeout_s)
        self._reason: ApiError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_open = False

    async def __aenter__(self) -> Span:
        await self._limit.__aenter__()
        self._is_open = True
        if self._reason is not None:  # before it began
            self._limit.reschedule(0)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._watcher is not None:
            self._watcher.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._reason or self._too_late() from None

    def end(self, reason: ApiError) -> None:
        """End it now; only the first reason counts. Does nothing once it has ended."""
        if self._reason is not None or self._limit.expired():
            return
        self._reason = reason
        if self._is_open:
            self._limit.reschedule(0)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(client_gone())

    def _too_late(self) -> ApiError:
        message = f"the request took longer than the {self._timeout_s:g} s it may take (max_request_s)"
        return ApiError(504, message, code="deadline_exceeded")
