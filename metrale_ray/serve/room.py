# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Room`: how much one front has on its way at a time, so that the head's queue is never filled by one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """`size` places. Whoever asks first is served first, however many places it needs: nobody is passed over."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = asyncio.Semaphore(size)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Hold `count` places; more than there are is as many as there are."""
        held = 0
        try:
            async with self._turn:
                while held < min(count, self._size):
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()
