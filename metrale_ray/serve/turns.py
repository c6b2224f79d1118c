# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Turns`: the items of an asynchronous generator for a reader in another thread, which may be interrupted at any time.

Rule: one call at a time. A call that was interrupted still cleans up on the loop when its reader is already closing,
and Python refuses to close a generator that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Made anywhere; the calls are for tasks of one loop."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._turn = asyncio.Lock()

    async def next(self) -> T:
        """The next item. Raises StopAsyncIteration behind the last one."""
        async with self._turn:
            return await anext(self._items)

    async def close(self) -> None:
        """End the generator, once a call that was interrupted has cleaned up."""
        async with self._turn:
            await self._items.aclose()
