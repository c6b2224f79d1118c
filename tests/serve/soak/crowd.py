# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Crowd`: many clients at once over real sockets, some of which leave in the middle.

A client that leaves closes its connection: before anything came, inside the first event, or behind it. It does so by
itself, at a place that its seed gives; nothing here waits for a clock but the earliest way to leave.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from metrale_ray.serve.text import Tokenizer
from tests.serve.soak.asks import Ask, Asker
from tests.serve.soak.replies import EventReader, whole_reply

LEAVERS = 0.25
"""The share of requests that are given up."""

TIMEOUT_S = 240.0
"""Far more than anything takes: a client that waits so long hangs."""


@dataclass
class Crowd:
    """`seen` counts what came of requests by kind; `on_answer` is called with their number after each."""

    url: str
    tokenizer: Tokenizer
    on_answer: Callable[[int], object]
    seen: Counter[str] = field(default_factory=Counter)

    async def run(self, num_clients: int, num_rounds: int) -> None:
        """Each of `num_clients` asks `num_rounds` times, one request after another."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(num_clients):
                clients.create_task(self._visit(session, number, num_rounds))

    async def _visit(self, session: aiohttp.ClientSession, number: int, num_rounds: int) -> None:
        asker, chance = Asker(number, self.tokenizer), random.Random(number)
        for _ in range(num_rounds):
            ask = asker.ask()
            if chance.random() < LEAVERS:
                await self._leave(session, ask, chance)
            else:
                await self._stay(session, ask)
            self.seen["requests"] += 1
            self.on_answer(self.seen["requests"])

    async def _stay(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        async with session.post(ask.path, json=ask.body) as response:
            assert response.status == 200, (ask, response.status, await response.text())
            if ask.streams:
                reader = EventReader()
                async for data in response.content.iter_any():
                    reader.push(data)
                assert reader.is_done, ask
                reply = reader.reply
            else:
                reply = whole_reply(await response.json())
        ask.check(reply)
        self.seen[ask.name] += 1
        ends = Counter(sequence.finish_reason for sequence in reply.sequences.values())
        self.seen.update({f"{ask.name} {reason}": count for reason, count in ends.items()})

    async def _leave(self, session: aiohttp.ClientSession, ask: Ask, chance: random.Random) -> None:
        """Leaving a whole answer is leaving before anything came: queued, in prefill or between tokens."""
        if not ask.streams or chance.random() < 0.3:
            try:
                async with asyncio.timeout(chance.uniform(0, 0.5)), session.post(ask.path, json=ask.body) as response:
                    await response.read()
            except TimeoutError:
                self.seen["left before"] += 1
            return
        async with session.post(ask.path, json=ask.body) as response:
            assert response.status == 200, (ask, response.status)
            inside = chance.random() < 0.5
            await (response.content.read(10) if inside else response.content.readany())
            response.close()
        self.seen["left inside" if inside else "left behind"] += 1
