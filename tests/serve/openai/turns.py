# SPDX-License-Identifier: MIT OR Apache-2.0
"""How often the event loop turns while something is done: how often others get their chance."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def turns_of(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """What `work` gives, and the turns between its first step and its last."""
    loop = asyncio.get_running_loop()
    num_turns = 0

    def count() -> None:
        nonlocal num_turns, handle
        num_turns += 1
        handle = loop.call_soon(count)

    task = asyncio.ensure_future(work)
    handle = loop.call_soon(count)
    try:
        return await task, num_turns - 1  # the last one wakes this
    finally:
        handle.cancel()
