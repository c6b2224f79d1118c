# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Watch`: a thread that waits for the engine's end, and knows its reason.

A front sees that the head has gone; whoever placed the ranks often knows why. Rules: the watch ends with a reason,
or because it was stopped, and never silently: what goes wrong in it is the engine's death too, as nobody would notice
the next one. However many callers wait for the reason, they wait on their loops and hold no thread. Leaves out where
the reasons come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from metrale_ray.errors import EngineDead

log = logging.getLogger(__name__)

# How often it is asked whether a rank has ended; the front's own session usually knows first.
WATCH_S = 1.0
# How long a call that saw the engine die waits for the reason, before it raises what it saw.
WHY_S = 2.5
# A rank that has ended is asked for its reason, which takes a moment; no more than this.
JOIN_TIMEOUT_S = 10.0


class Watch:
    """`wait_ended` waits up to so many seconds and says why the engine has ended, or None; `on_death` is told once."""

    def __init__(
        self,
        wait_ended: Callable[[float], EngineDead | None],
        on_death: Callable[[EngineDead], None],
        *,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self._wait_ended = wait_ended
        self._on_death = on_death
        self._join_timeout_s = join_timeout_s
        self._is_stopped = False
        self._is_told = False  # the reason is known, or none will come
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # who waits for that, on which loop
        self._telling = threading.RLock()  # a signal's handler may stop the watch in the middle of it
        self._death: EngineDead | None = None
        self._thread = threading.Thread(target=self._run, name="llm-watch", daemon=True)

    @property
    def death(self) -> EngineDead | None:
        """Why the engine has ended, as far as the watch knows; None while it runs."""
        return self._death

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """An end from now on is no death: it is what the caller wants. Returns at once."""
        self._is_stopped = True
        self._tell()

    def join(self) -> None:
        """Wait for the thread's end, once no rank runs."""
        if not self._thread.is_alive():
            return
        self._thread.join(self._join_timeout_s)
        if self._thread.is_alive():
            log.warning("the thread %s has not ended within %g s", self._thread.name, self._join_timeout_s)

    async def explain(self, seen: EngineDead) -> EngineDead:
        """The death as it is told to a caller: what it saw, or, soon after, what the watch knows of its rank."""
        await self._wait_told()
        known = self._death
        if known is None or (seen.rank is not None and known.rank != seen.rank):
            return seen
        return EngineDead(known.message, rank=known.rank)

    async def _wait_told(self) -> None:
        """Wait until the reason is known or none will come, for WHY_S at most."""
        told = asyncio.Event()
        with self._telling:
            if self._is_told:
                return
            self._waiting[told] = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WHY_S):
                await told.wait()
        except TimeoutError:
            log.debug("no reason of the engine's end within %g s", WHY_S)
        finally:
            with self._telling:
                self._waiting.pop(told, None)

    def _tell(self) -> None:
        """Wake all who wait. From any thread."""
        with self._telling:
            self._is_told = True
            waiting, self._waiting = self._waiting, {}
        for told, loop in waiting.items():
            with contextlib.suppress(RuntimeError):  # a loop that was closed under its tasks: nobody waits there
                loop.call_soon_threadsafe(told.set)

    def _run(self) -> None:
        death = self._next_death()
        if death is not None:
            self._death = death
            self._tell()
            self._on_death(death)

    def _next_death(self) -> EngineDead | None:
        """Wait for it; None when the watch was stopped before."""
        try:
            while not self._is_stopped:
                death = self._wait_ended(WATCH_S)
                if death is not None:
                    return None if self._is_stopped else death
        except BaseException as error:  # whatever it is, this thread is where it ends
            if self._is_stopped:
                log.debug("the watch was stopped as it asked", exc_info=True)
                return None
            log.exception("the watch over the ranks failed")
            return EngineDead(f"the ranks cannot be watched any more: {type(error).__name__}: {error}")
        return None
