# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several asynchronous generators read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from metrale_ray.serve.merge import merged


class Source:
    """Gives what a test puts into it; an exception is raised, None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closed = False

    async def items(self) -> AsyncGenerator[str, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


def sources_of(count: int) -> tuple[list[Source], AsyncGenerator[list[tuple[int, str]], None]]:
    sources = [Source() for _ in range(count)]
    return sources, merged([source.items() for source in sources])


def test_what_is_there_at_once_is_one_item_in_order_of_the_sources() -> None:
    async def script() -> None:
        (first, second, third), items = sources_of(3)
        for source, name in ((third, "c"), (first, "a")):
            source.queue.put_nowait(name)
        assert await anext(items) == [(0, "a"), (2, "c")]
        second.queue.put_nowait("b")
        assert await anext(items) == [(1, "b")]
        for source in (first, second, third):
            source.queue.put_nowait(None)
        assert [item async for item in items] == []

    asyncio.run(script())


def test_of_one_source_one_item_is_on_its_way_at_a_time() -> None:
    async def script() -> None:
        (first, _), items = sources_of(2)
        for name in "abc":
            first.queue.put_nowait(name)
        assert await anext(items) == [(0, "a")]
        assert first.queue.qsize() == 2
        await items.aclose()

    asyncio.run(script())


def test_an_error_of_one_source_ends_and_closes_all() -> None:
    async def script() -> None:
        sources, items = sources_of(3)
        sources[1].queue.put_nowait(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await anext(items)
        assert all(source.is_closed for source in sources)

    asyncio.run(script())


@pytest.mark.parametrize("cancels", [False, True])
def test_closing_it_and_cancelling_its_reader_close_all_sources(cancels: bool) -> None:
    async def script() -> None:
        sources, items = sources_of(2)
        sources[0].queue.put_nowait("a")
        assert await anext(items) == [(0, "a")]
        if cancels:
            reading = asyncio.ensure_future(anext(items))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await items.aclose()
        assert [source.is_closed for source in sources] == [True, True]

    asyncio.run(script())
