# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Drain`: the end of a service in order: nobody new is admitted, who runs may finish for a while, the rest is told.

Rules: everything that asks an engine for tokens runs under it. `run` takes a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.span import Span

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""For the last event of a stream, to a client that may not read: far more than it takes otherwise."""


class Drain:
    """One for each app; its methods belong to the app's loop."""

    def __init__(self) -> None:
        self._spans: set[Span] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are turned away."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """The requests that have not had their whole answer."""
        return len(self._spans)

    def check(self) -> None:
        """Raise ApiError 503 when nobody is admitted any more."""
        if self._is_draining:
            raise draining()

    @contextmanager
    def admitted(self, span: Span) -> Iterator[None]:
        """Around all of a request's work and answer. Raises ApiError 503 when nobody is admitted any more."""
        self.check()
        self._spans.add(span)
        self._is_empty.clear()
        try:
            yield
        finally:
            self._spans.discard(span)
            if not self._spans:
                self._is_empty.set()

    def begin(self) -> None:
        """Admit nobody from now on."""
        self._is_draining = True

    def end_all(self) -> None:
        """End what runs now: a stream with an error event, anything else with a 503."""
        for span in list(self._spans):
            message = "the service shuts down, and this request has not ended in the time it had; ask again"
            span.end(ApiError(503, message, code="shutting_down"))

    async def run(self, timeout_s: float) -> None:
        """Admit nobody, wait for those who run, at most `timeout_s`, then end the rest and wait until they are told."""
        self.begin()
        log.info("draining: %d requests run, and have %g s", self.num_running, timeout_s)
        if await self._emptied(timeout_s):
            return
        log.warning("draining: %d requests have not ended and are ended now", self.num_running)
        self.end_all()
        if not await self._emptied(2 * LAST_WORDS_S):
            log.warning("draining: %d requests do not end, and are left behind", self.num_running)

    async def _emptied(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


def draining() -> ApiError:
    """What a request is told that comes during the end."""
    message = "the service is shutting down and takes no new requests; another one may answer"
    return ApiError(503, message, code="draining", headers={"Connection": "close"})
