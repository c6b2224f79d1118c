# SPDX-License-Identifier: MIT OR Apache-2.0
"""Threads for texts: a bounded line, which those who leave do not fill, and long texts apart from the others."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.serve.failures import of_error
from metrale_ray.serve.text_threads import LONG_CHARACTERS, NUM_THREADS, TextThreads, in_text_thread


class Held:
    """Work that waits until it is let go; `is_at` tells that it has begun."""

    def __init__(self) -> None:
        self.is_at, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.is_at.set()
        assert self.go.wait(30)
        return "done"


async def begun(held: Held) -> None:
    assert await asyncio.to_thread(held.is_at.wait, 30)


def test_work_is_done_in_another_thread_and_what_it_raises_is_raised() -> None:
    async def script() -> None:
        threads = TextThreads(1, 0)
        assert await threads.run(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
        assert await threads.run(lambda: 7) == 7  # nothing is left of the others

    asyncio.run(script())


def test_who_comes_to_a_full_line_is_told_to_come_again_and_it_moves() -> None:
    async def script() -> None:
        threads, held = TextThreads(1, 2), Held()
        first = asyncio.ensure_future(threads.run(held))
        await begun(held)
        waiting = [asyncio.ensure_future(threads.run(lambda: "next")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="3 texts wait") as caught:
            await threads.run(lambda: "late")
        failure = of_error(caught.value)
        assert (failure.status, failure.code, failure.retry_after_s) == (429, "too_many_requests", 1)
        held.go.set()
        assert await asyncio.gather(first, *waiting) == ["done", "next", "next"]
        assert await threads.run(lambda: "late") == "late"

    asyncio.run(script())


def test_who_leaves_the_line_makes_room_and_leaves_nothing_and_is_not_worked_for() -> None:
    async def script() -> None:
        threads, held, left = TextThreads(1, 1), Held(), Held()
        first = asyncio.ensure_future(threads.run(held))
        await begun(held)
        for _ in range(5):
            leaving = asyncio.ensure_future(threads.run(left))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        await asyncio.sleep(0)  # the line is told
        kept, is_at = weakref.ref(left), left.is_at
        del left, leaving
        gc.collect()
        assert kept() is None
        waiting = asyncio.ensure_future(threads.run(lambda: "next"))
        await asyncio.sleep(0)
        held.go.set()
        assert await asyncio.gather(first, waiting) == ["done", "next"]
        assert not is_at.is_set()

    asyncio.run(script())


def test_long_texts_hold_up_neither_shorter_ones_nor_other_work_in_threads() -> None:
    async def script() -> None:
        helds = [Held() for _ in range(NUM_THREADS + 8)]
        long = [asyncio.ensure_future(in_text_thread(LONG_CHARACTERS + 1, held)) for held in helds]
        for held in helds[:NUM_THREADS]:
            await begun(held)
        assert await in_text_thread(LONG_CHARACTERS, lambda: "short") == "short"
        assert await asyncio.to_thread(lambda: "other") == "other"
        for held in helds:
            held.go.set()
        assert await asyncio.gather(*long) == ["done"] * len(helds)

    asyncio.run(script())
