# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Compiling`: requests whose grammars are compiled on their way into the engine.

Rules: the head's loop calls it, and nothing is compiled there or on the engine's thread, but in a few threads, in the
order in which the requests came. They wait in the inbox meanwhile, where they may be ended like any other; those
without a grammar pass them by. A request waits for a thread for so long and for its grammar for so long, and is refused
then; a thread is given the next grammar when it is done with its last, however long that takes. Whatever fails, also a
panic in Rust, is an answer to its request, and its thread's place is free again.

What it leaves out: what a grammar may cost, which bounds how long a thread is busy (`grammar`). A front that serves
strangers looks at their texts before, in a process that can be ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from metrale_ray.errors import RequestError
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.inbox import Arrived, Inbox
from metrale_ray.surroundings import in_daemon_thread

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 2.0
"""A usual schema takes milliseconds. What takes longer than this is refused."""

LINE_TIMEOUT_S = 10.0
"""How long a request waits for a thread: a few grammars that take as long as they may."""

MAX_THREADS = 2
"""Grammars at a time: the cores are the engine's."""

T = TypeVar("T")


class Aside(Protocol):
    """What `work` gives, from a thread that keeps no process from ending."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


Refuse = Callable[[Arrived, RequestError], None]


class Compiling:
    """Between a head's loop and `inbox`. `refuse` tells a front that its request is not taken."""

    def __init__(
        self,
        grammars: Grammars,
        inbox: Inbox,
        refuse: Refuse,
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        line_timeout_s: float = LINE_TIMEOUT_S,
        max_threads: int = MAX_THREADS,
        aside: Aside = in_daemon_thread,
    ) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._line_timeout_s = line_timeout_s
        self._free = asyncio.Semaphore(max(1, max_threads))
        self._aside = aside
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Requests that wait for their grammars, and those that are refused and whose threads are still busy."""
        return len(self._tasks)

    def start(self, arrived: Arrived) -> None:
        """Compile the grammar of a request that waits in the inbox; let it go on there, or refuse it."""
        try:
            kept = self._grammars.kept(_text(arrived))
        except BaseException as error:
            self._end(arrived, _refusal(error))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # they are this thread's, not the grammar's
            return
        if kept is not None:
            self._inbox.ready(arrived, kept)
            return
        task = asyncio.ensure_future(self._run(arrived))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """The engine has ended: nothing is compiled for it any more."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, arrived: Arrived) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), self._line_timeout_s)
        except TimeoutError:
            self._end(arrived, _crowded(self._line_timeout_s))
            return
        try:
            if self._inbox.is_preparing(arrived):
                await self._compile(arrived)
        except Exception as error:  # noqa: BLE001  whatever it is, the request is answered
            self._end(arrived, _refusal(error))
        finally:
            self._free.release()

    async def _compile(self, arrived: Arrived) -> None:
        """With a thread of its own, until the thread is free again."""
        await self._in_thread(self._grammars.load)
        text = _text(arrived)
        compiled = self._in_thread(lambda: self._grammars.compile(text))
        done, _ = await asyncio.wait({compiled}, timeout=self._timeout_s)
        if not done:
            self._end(arrived, _too_slow(self._timeout_s))
            await asyncio.wait({compiled})
        self._inbox.ready(arrived, compiled.result())  # unless it has been refused or has ended meanwhile

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What `work` gives, in a thread. Raises RequestError for all it raises."""
        return asyncio.ensure_future(self._aside(_guarded(work)))

    def _end(self, arrived: Arrived, error: RequestError) -> None:
        if self._inbox.withdraw(arrived):
            self._refuse(arrived, error)


def _guarded(work: Callable[[], T]) -> Callable[[], T]:
    """`work`, which raises RequestError for all it raises."""

    def run() -> T:
        try:
            return work()
        except BaseException as error:  # whoever waits is told, whatever it is
            raise _refusal(error) from error

    return run


def _text(arrived: Arrived) -> str:
    text = arrived.submit.params.grammar
    assert text is not None, "only requests with a grammar come here"
    return text


def _refusal(error: BaseException) -> RequestError:
    """What whoever waits is told of a failure; what is no refusal by itself is a fault, and goes into the log."""
    if isinstance(error, RequestError):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    reason = f"{type(error).__name__}: {error}"
    return RequestError(f"the grammar could not be compiled: {reason}", code="invalid_grammar")


def _too_slow(timeout_s: float) -> RequestError:
    return RequestError(
        f"the grammar takes more than {timeout_s:g} s to compile, which is what is allowed; make it simpler",
        code="invalid_grammar",
    )


def _crowded(timeout_s: float) -> RequestError:
    return RequestError(
        f"other grammars have kept this one waiting for {timeout_s:g} s; try again later", code="queue_full"
    )
