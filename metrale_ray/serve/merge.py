# SPDX-License-Identifier: MIT OR Apache-2.0
"""`merged`: several asynchronous generators read as one, without losing which of them an item is of.

Rules: of each source one item is on its way at a time, so a slow reader makes nothing pile up here. An error of one
source ends all. Closing the merged one, or an error, closes every source before it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[list[tuple[int, T]], None]:
    """What the sources give, each item with everything that is there: (number of the source, its item), in order."""
    waiting = {number: asyncio.ensure_future(_next(source)) for number, source in enumerate(sources)}
    try:
        while waiting:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            items = []
            for number in [number for number, task in waiting.items() if task.done()]:
                found = waiting.pop(number).result()
                if found:
                    items.append((number, found[0]))
            if items:
                yield sorted(items, key=lambda item: item[0])
            for number, _ in items:
                waiting[number] = asyncio.ensure_future(_next(sources[number]))
    finally:
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next item, or nothing at the end."""
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return ()
