# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from metrale_ray.serve.http.turnstile import Turnstile
from tests.serve.http.asgi import asked, scope_of


class Turns:
    """Counts the turns of the loop, and notes in which one each request passed."""

    def __init__(self) -> None:
        self.number = 0
        self.passed: list[tuple[str, int]] = []
        self._count()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((scope["path"], self.number))

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.passed]

    def _count(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._count)


def test_a_few_pass_in_each_turn_of_the_loop_in_the_order_in_which_they_came() -> None:
    async def go() -> None:
        turns = Turns()
        gate = Turnstile(turns.app, 3)
        await asyncio.gather(*(asked(gate, "POST", f"/{number}") for number in range(20)))
        assert turns.paths == [f"/{number}" for number in range(20)]
        assert max(Counter(turn for _, turn in turns.passed).values()) <= 3
        assert len({turn for _, turn in turns.passed}) < 20  # and not each alone

    asyncio.run(go())


def test_who_is_alone_does_not_wait_and_neither_does_a_probe_behind_a_crowd() -> None:
    async def go() -> None:
        turns = Turns()
        gate = Turnstile(turns.app, 1)
        for number in range(3):  # each behind the one before it
            await asked(gate, "POST", f"/{number}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert turns.paths == ["/0", "/1", "/2"]
        assert len({turn for _, turn in turns.passed}) == 3
        crowd = [asyncio.ensure_future(asked(gate, "POST", "/crowd")) for _ in range(5)]
        probe = asyncio.ensure_future(asked(gate, "GET", "/health"))
        await asyncio.gather(probe, *crowd)
        assert turns.paths[3:5] == ["/crowd", "/health"]

    asyncio.run(go())


def test_one_that_was_cancelled_while_it_waited_holds_nobody_up() -> None:
    async def go() -> None:
        turns = Turns()
        gate = Turnstile(turns.app, 1)
        tasks = [asyncio.ensure_future(asked(gate, "POST", f"/{number}")) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert turns.paths == ["/0", "/2", "/3"]

    asyncio.run(go())


def test_what_is_no_request_passes() -> None:
    async def go() -> None:
        turns = Turns()
        await Turnstile(turns.app, 1)({**scope_of("POST", "/"), "type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert turns.paths == ["/"]

    asyncio.run(go())
