# SPDX-License-Identifier: MIT OR Apache-2.0
"""`in_text_thread`: the threads in which texts become tokens and tokens texts, apart from those for everything else.

Rules. A tokenizer cannot be stopped, so those who ask for much must not hold up the others: there are a few threads
for long texts and a few for shorter ones, each with a line of bounded length, and who comes when it is full is told to
come again. Whoever leaves the line takes what he brought with him; what has begun is done to its end for nobody.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from metrale_ray.errors import RequestError

T = TypeVar("T")

LONG_CHARACTERS = 64 * 1024
"""A longer text may take seconds, so it waits among its like."""

NUM_THREADS = 2
MAX_LONG_WAITING = 64
MAX_SHORT_WAITING = 512
"""Texts that wait; each keeps some kilobytes, a long one some megabytes."""


class TextThreads:
    """`num_threads` that work, and a line of `max_waiting` before them. For any thread and any event loop."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="texts")
        self._max_open = num_threads + max_waiting
        self._lock = threading.Lock()
        self._num_open = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises in a thread. Raises RequestError "too_many_requests" when the line is full."""
        self._enter()
        job = _Job(work)
        future = self._threads.submit(job.run)
        future.add_done_callback(lambda future: self._leave(job))
        return await asyncio.wrap_future(future)

    def _enter(self) -> None:
        with self._lock:
            if self._num_open >= self._max_open:
                raise RequestError(
                    f"{self._num_open} texts wait to be tokenized, which is the most. Try again.",
                    code="too_many_requests",
                )
            self._num_open += 1

    def _leave(self, job: _Job[Any]) -> None:
        job.work = None
        with self._lock:
            self._num_open -= 1


class _Job(Generic[T]):
    """What stays in the line of a pool when whoever asked has left: nothing but this."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work: Callable[[], T] | None = work

    def run(self) -> T:
        assert self.work is not None  # it is dropped with the future, and then nobody runs it
        return self.work()


async def in_text_thread(num_characters: int, work: Callable[[], T]) -> T:
    """What `work` on so much text returns or raises. Raises RequestError "too_many_requests" when too much waits."""
    return await _threads(num_characters > LONG_CHARACTERS).run(work)


@functools.cache
def _threads(are_long: bool) -> TextThreads:
    """Those of this process: all its models share its cores."""
    return TextThreads(NUM_THREADS, MAX_LONG_WAITING if are_long else MAX_SHORT_WAITING)
