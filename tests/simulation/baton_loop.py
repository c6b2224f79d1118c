# SPDX-License-Identifier: MIT OR Apache-2.0
"""`BatonLoop`: an asyncio event loop whose waits are a baton's and whose time is virtual.

Rules: it has no sockets and no signals. Each of its turns is a hand-over. What goes wrong in a callback is kept in
`errors`, since nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from metrale_ray.baton import Baton, Killed, Process

T = TypeVar("T")
MAX_CLOSES = 16
"""How often a coroutine of a dead process is closed: each of its clean-ups may wait for something once more."""


class BatonLoop(asyncio.BaseEventLoop):
    """Runs in the task of `baton` that calls `run`."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self.errors: list[str] = []
        self._baton = baton
        self._is_woken = False
        self._selector = self  # whose `select` the base class calls
        self._pending: dict[asyncio.Future[Any], None] = {}  # the tasks, in the order in which they were made
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """What `main` gives. Then, or when this task is killed, all that is left on the loop is let go."""
        try:
            result = self.run_until_complete(main)
            self._cancel_all()
            return result
        finally:
            self._drop_all()
            self.close()

    @classmethod
    def current(cls) -> BatonLoop:
        """The one that runs the caller."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls), "the caller runs on a loop of another kind"
        return loop

    def time(self) -> float:
        """Virtual seconds."""
        return self._baton.now

    def select(self, timeout_s: float | None) -> list[Any]:
        """Give the baton away until another task calls `call_soon_threadsafe`, or the next timer is due."""
        self._baton.wait_until(self._has_news, timeout_s, "an event of its loop")
        self._is_woken = False
        return []

    async def in_task(self, name: str, work: Callable[[], T], process: Process | None) -> T:
        """What `work` gives, in a task of the baton."""
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  whoever waits is told, whatever it is
                self._tell(future, error, None)
            else:
                self._tell(future, None, result)

        self._baton.start(name, run, process)
        return await future

    def _tell(self, future: asyncio.Future[Any], error: Exception | None, result: Any) -> None:
        def tell() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(tell)

    def _has_news(self) -> bool:
        return self._is_woken

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: who has news calls `call_soon_threadsafe`."""

    def _write_to_self(self) -> None:
        self._is_woken = True

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._pending[task] = None
        task.add_done_callback(lambda task: self._pending.pop(task, None))
        return task

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):  # which the next wait raises again
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _cancel_all(self) -> None:
        left = list(self._pending)
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    def _drop_all(self) -> None:
        """Close what is left, now: the collector of garbage would do it at a time of its own."""
        for task in list(self._pending):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own name for it
            coroutine = task.get_coro()  # type: ignore[attr-defined]
            for _ in range(MAX_CLOSES):
                with contextlib.suppress(BaseException):
                    coroutine.close()
                    break
        self._pending.clear()
        self.set_exception_handler(_let_go)


def _let_go(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What futures of a loop that has ended say of themselves when they are collected."""
