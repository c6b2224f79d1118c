# SPDX-License-Identifier: MIT OR Apache-2.0
"""A generator whose reader is interrupted, and closes it while it still cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from metrale_ray.serve.turns import Turns


def test_closing_waits_for_the_clean_up_of_an_interrupted_call() -> None:
    seen: list[str] = []

    async def slow_to_end() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def script() -> None:
        items = Turns(slow_to_end())
        assert await items.next() == 1
        waiting = asyncio.ensure_future(items.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await items.close()
        assert seen == ["cleaned up"]
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await items.next()

    asyncio.run(script())
