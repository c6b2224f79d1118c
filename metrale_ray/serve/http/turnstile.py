# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Turnstile`: of many requests that come at once, a few go on in each turn of the event loop.

To read, check and prepare a request takes some milliseconds of the loop. Without this, all that have come are looked at
in one turn, and 500 of them hold up every stream for more than a second.

Rules: first come, first served; only what has a body waits, so that probes of health never do; who is alone does not
wait at all. Whose client goes meanwhile goes on in its turn, and is found gone there.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

NUM_IN_ONE_TURN = 4
"""About ten milliseconds, which is less than a token takes."""


class Turnstile:
    """An ASGI middleware, for one event loop."""

    def __init__(self, app: ASGIApp, num_in_one_turn: int = NUM_IN_ONE_TURN) -> None:
        self._app = app
        self._num_in_one_turn = num_in_one_turn
        self._num_left = num_in_one_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass when it is its turn."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._pass()
        await self._app(scope, receive, send)

    async def _pass(self) -> None:
        if self._num_left and not self._waiting:
            self._num_left -= 1
            self._turn_later()
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._turn_later()
        await place

    def _turn_later(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The next turn of the loop: a few more pass."""
        self._is_turning = False
        self._num_left = self._num_in_one_turn
        while self._waiting and self._num_left:
            place = self._waiting.popleft()
            if not place.done():  # the server may have cancelled it
                place.set_result(None)
                self._num_left -= 1
        if self._num_left < self._num_in_one_turn:
            self._turn_later()
