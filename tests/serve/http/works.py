# SPDX-License-Identifier: MIT OR Apache-2.0
"""Work that a test holds in its hand: it goes on when it is told, and says where it was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from metrale_ray.serve.http.answer import Answer, Started
from metrale_ray.serve.http.drain import Drain

Step = Callable[[], Awaitable[Any]]


class Held:
    """`Started`: prepares, gives whole or streams two chunks; waits for good at the places named in `holds`."""

    def __init__(self, *holds: str, error: Exception | None = None, fails_at: str = "") -> None:
        self._holds = holds
        self._error = error
        self._fails_at = fails_at
        self.reached: list[str] = []
        self.cancelled: list[str] = []
        self.is_at = {place: asyncio.Event() for place in ("start", "whole", "first", "second", "end")}

    async def start(self) -> Started:
        await self._pass("start")
        return self

    async def whole(self) -> dict[str, Any]:
        await self._pass("whole")
        return {"answer": 1}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for place in ("first", "second"):
            await self._pass(place)
            yield f"data: {place}\n\n".encode()
        await self._pass("end")

    async def _pass(self, place: str) -> None:
        self.reached.append(place)
        self.is_at[place].set()
        try:
            if place in self._holds:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(place)
            raise
        if self._error is not None and place == self._fails_at:
            raise self._error


def answer_of(held: Held, *, streams: bool, drain: Drain | None = None, max_request_s: float = 60.0) -> Answer:
    """The response of a route that does this work."""
    return Answer(held.start, drain or Drain(), streams=streams, max_request_s=max_request_s, headers={"X-Own": "1"})
