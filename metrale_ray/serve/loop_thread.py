# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LoopThread`: an event loop in a thread of its own, for callers in other threads.

Rules. Whoever waits is answered, also when the loop is closed meanwhile: with EngineDead. A reader that is forgotten is
ended by the garbage collector, on any thread and in the middle of anything, this file's own calls and the loop's thread
included: so ending a reader never waits and takes no lock. What is being read is kept until it was closed, so the
collector never ends the asynchronous part by itself. Closing takes a bounded time, and what is left behind is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from metrale_ray.errors import EngineDead
from metrale_ray.serve.turns import Turns

log = logging.getLogger(__name__)

T = TypeVar("T")

# Cleaning up sends an abort and waits for nothing else, so this is far more than it takes.
END_TIMEOUT_S = 10.0
# The loop has been told to stop: all that can hold it is a call that does not return.
STOP_TIMEOUT_S = 1.0


class LoopThread:
    """Make it, `start` it, and `close` it. `closed_reason` is what callers are told from then on."""

    def __init__(self, name: str, closed_reason: str, *, end_timeout_s: float = END_TIMEOUT_S) -> None:
        self._closed_reason = closed_reason
        self._end_timeout_s = end_timeout_s
        self._is_closed = False
        # Between a call that begins and `close`. A signal's handler may close in the middle of a call.
        self._lock = threading.RLock()
        self._waiting: set[Future[Any]] = set()
        self._open: set[Turns[Any]] = set()
        self._endings: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        self._last: asyncio.Task[None] | None = None  # ends all others
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run the loop from now on."""
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises on the loop. Raises EngineDead when the loop is closed."""
        future = self._begin(work)
        future.add_done_callback(self._waiting.discard)
        try:
            return future.result()
        except CancelledError:
            if not self._is_closed:
                raise
            raise EngineDead(self._closed_reason) from None
        except BaseException:
            future.cancel()  # Ctrl-C: the coroutine's own clean-up aborts what runs
            raise

    def read(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """The items, which are made on the loop, for a reader in another thread. Leaving early closes `items` there."""
        turns = Turns(items)
        self._open.add(turns)
        try:
            while True:
                try:
                    item = self.wait(turns.next())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._hand_over(turns)

    def close(self) -> None:
        """End everything that runs on the loop, then the loop. May be called again."""
        with self._lock:
            first, self._is_closed = not self._is_closed, True
        if not first:
            return
        if self._thread.is_alive():
            self._end()
        else:  # it was never started
            self._answer_all()
            self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._is_closed:
                try:
                    future = asyncio.run_coroutine_threadsafe(work, self._loop)
                    self._waiting.add(future)
                    return future
                except RuntimeError:
                    if not self._loop.is_closed():  # by a signal's handler, a moment ago
                        raise
        work.close()
        raise EngineDead(self._closed_reason)

    def _hand_over(self, turns: Turns[Any]) -> None:
        """Let the loop close `turns`. The collector calls this: nothing here waits."""
        try:
            self._loop.call_soon_threadsafe(self._begin_ending, turns)
        except RuntimeError:
            if not self._loop.is_closed():  # its end has closed all turns
                raise

    def _begin_ending(self, turns: Turns[Any]) -> None:
        if self._is_closed:  # `_end_all` sees to it
            return
        task = self._loop.create_task(self._end_turns(turns))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end_turns(self, turns: Turns[Any]) -> None:
        try:
            await turns.close()
        except Exception:  # nobody waits for it, so it is told here
            log.exception("what a reader left could not be cleaned up")
        self._open.discard(turns)

    async def _end_all(self) -> None:
        """End every task but this one, and whatever is still open behind a reader."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for turns in list(self._open):
            await self._end_turns(turns)

    def _begin_last(self) -> None:
        self._last = self._loop.create_task(self._end_all())
        self._last.add_done_callback(lambda task: self._loop.stop())

    def _give_up_last(self) -> None:
        if self._last is not None:
            self._last.cancel()

    def _answer_all(self) -> None:
        """Whoever still waits is told that the loop is closed."""
        for future in list(self._waiting):
            future.cancel()

    def _end(self) -> None:
        """Wait for the end of the thread, which comes by itself also if this wait is interrupted."""
        self._loop.call_soon_threadsafe(self._begin_last)
        self._thread.join(self._end_timeout_s)
        if not self._thread.is_alive():
            return
        log.warning("what ran in %s has not ended within %g s", self._thread.name, self._end_timeout_s)
        self._answer_all()
        with contextlib.suppress(RuntimeError):  # it has ended after all
            self._loop.call_soon_threadsafe(self._give_up_last)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the thread %s does not stop, and is left behind", self._thread.name)
