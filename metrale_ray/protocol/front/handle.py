# SPDX-License-Identifier: MIT OR Apache-2.0
"""`RequestHandle`: one request as its reader sees it, from any thread or event loop.

Rules: outputs come in the order in which they were sent; what was received before the engine died is read before
EngineDead is raised; whoever waits is woken by every output and by the death. Any number of readers may wait; each
output goes to one of them. A request ends when all of its sequences have ended, or when it is refused. The queue has
no bound of its own: a request's tokens are bounded by the model's length.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from metrale_ray.clock import Condition
from metrale_ray.errors import EngineDead, SessionError
from metrale_ray.protocol.front.messages import Abort, Finish, Output

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class RequestHandle:
    """What `FrontClient.submit` returns. `ends_with`, `put` and `die` are the client's to call."""

    def __init__(
        self,
        request_id: int,
        send: Callable[[Abort | Finish], None],
        num_sequences: int = 1,
        condition: Condition | None = None,
    ) -> None:
        self.request_id = request_id
        self._send = send
        self._changed: Condition = threading.Condition() if condition is None else condition
        self._outputs: deque[Output] = deque()
        self._waiters: list[Waiter] = []
        self._live = set(range(num_sequences))  # the sequences whose last output has not arrived
        self._death: EngineDead | None = None

    def get(self, timeout_s: float | None = None) -> Output:
        """The next output, waiting for it. The one with a `finish_reason` is the last of its sequence.

        Raises EngineDead when the engine died and everything received has been read, TimeoutError after `timeout_s`,
        and SessionError when the last output of every sequence has been read already.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_answer, timeout_s):
                raise TimeoutError(f"request {self.request_id} gave no output within {timeout_s:g} s")
            return self._take()

    async def aget(self) -> Output:
        """`get` for a task of an event loop. A cancelled wait loses no output."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._has_answer():
                    return self._take()
                waiter = (loop, loop.create_future())
                self._waiters.append(waiter)
            try:
                await waiter[1]
            finally:
                self._forget(waiter)

    def ready(self) -> list[Output]:
        """The outputs that are there, in order; none is waited for, and no death is told."""
        with self._changed:
            outputs = list(self._outputs)
            self._outputs.clear()
            return outputs

    def abort(self) -> None:
        """Ask the head to end all sequences; their last outputs then say "abort". Does nothing once they have ended."""
        self._ask(Abort(self.request_id))

    def finish(self, index: int = 0) -> None:
        """Tell the head that a stop string ended the text of one sequence; its last output then says "stop"."""
        self._ask(Finish(self.request_id, index))

    def ends_with(self, output: Output) -> bool:
        """Whether `output`, which is put next, is the last of the request."""
        return output.is_refusal or (output.finish_reason is not None and self._live == {output.index})

    def put(self, output: Output) -> None:
        """Hand over one output that arrived. One for a sequence that has ended, or that there is not, is let go."""
        with self._changed:
            if output.index not in self._live:
                return
            self._outputs.append(output)
            if output.is_refusal:
                self._live.clear()
            elif output.finish_reason is not None:
                self._live.remove(output.index)
            self._wake()

    def die(self, death: EngineDead) -> None:
        """No output will arrive any more."""
        with self._changed:
            self._death = death
            self._wake()

    def _ask(self, message: Abort | Finish) -> None:
        with self._changed:
            live = message.index in self._live if isinstance(message, Finish) else bool(self._live)
            is_answered = not live or self._death is not None
        if not is_answered:
            self._send(message)

    def _has_answer(self) -> bool:
        return bool(self._outputs) or not self._live or self._death is not None

    def _take(self) -> Output:
        if self._outputs:
            return self._outputs.popleft()
        if not self._live:
            raise SessionError(f"request {self.request_id} has ended and its last output was read")
        assert self._death is not None  # the third way to have an answer
        raise EngineDead(self._death.message, rank=self._death.rank)  # a new one: raising changes its traceback

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            if not loop.is_closed():
                _wake_waiter(loop, future)

    def _forget(self, waiter: Waiter) -> None:
        with self._changed:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


def _wake_waiter(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        # The loop was closed a moment ago, and its waiters have gone with it.
        if not loop.is_closed():
            raise


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
