# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Run`: all requests of one run, sent when they are due, and the samples of what came.

Rules: a request with a time is sent at that time, however many are still running. The samples are in the run from the
moment a request is sent, so a run that is cut short can still say what it saw. After `seconds` no new request is sent;
those that run are waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

import aiohttp

from metrale_ray.traffic.arrivals import Closed
from metrale_ray.traffic.dialect import Dialect
from metrale_ray.traffic.exchange import exchange
from metrale_ray.traffic.lag import Lag
from metrale_ray.traffic.question import Question
from metrale_ray.traffic.questions import Plan
from metrale_ray.traffic.sample import Sample
from metrale_ray.traffic.words import PromptMaker


class Run:
    """One run of `plan` against `url`. The numbers may be read at any time, from the loop's thread."""

    def __init__(self, plan: Plan, dialect: Dialect, maker: PromptMaker, url: str, seconds: float | None) -> None:
        self.samples: list[Sample] = []
        self.lag = Lag()
        self.start_s = perf_counter()
        self.end_s: float | None = None
        self.num_ended = 0
        self.num_failed = 0
        self.num_pieces = 0
        self.peak_running = 0
        self._plan = plan
        self._dialect = dialect
        self._maker = maker
        self._url = url
        self._seconds = seconds

    @property
    def num_running(self) -> int:
        """Requests that have been sent and have not ended."""
        return len(self.samples) - self.num_ended

    @property
    def passed_s(self) -> float:
        """Seconds from the start until the last answer, or until now."""
        return (perf_counter() if self.end_s is None else self.end_s) - self.start_s

    async def drive(self, client: aiohttp.ClientSession) -> None:
        """Send everything and wait for the answers. Cancelled, it leaves what was seen until then."""
        self.lag = Lag()
        self.start_s = perf_counter()
        watcher = asyncio.ensure_future(self.lag.watch())
        questions = self._plan.questions(self._maker)
        try:
            if isinstance(self._plan.arrivals, Closed):
                await self._drive_closed(client, questions, self._plan.arrivals.num_clients)
            else:
                await self._drive_open(client, questions)
        finally:
            watcher.cancel()
            self.end_s = perf_counter()

    async def _drive_closed(self, client: aiohttp.ClientSession, questions: Iterator[Question], num: int) -> None:
        async def one_client() -> None:
            while not self._is_over():
                question = next(questions, None)
                if question is None:
                    return
                await self._ask(client, self._dialect.body(question), perf_counter())

        async with asyncio.TaskGroup() as clients:
            for _ in range(num):
                clients.create_task(one_client())

    async def _drive_open(self, client: aiohttp.ClientSession, questions: Iterator[Question]) -> None:
        async with asyncio.TaskGroup() as requests:
            for question in questions:
                due_s = question.due_s or 0.0
                if self._seconds is not None and due_s >= self._seconds:
                    return
                body = self._dialect.body(question)  # before its time, which is then spent on sending alone
                await asyncio.sleep(self.start_s + due_s - perf_counter())
                requests.create_task(self._ask(client, body, self.start_s + due_s))

    async def _ask(self, client: aiohttp.ClientSession, body: bytes, due_s: float) -> None:
        now_s = perf_counter()
        sample = Sample(now_s, late_s=now_s - due_s)
        self.samples.append(sample)
        self.peak_running = max(self.peak_running, self.num_running)
        await exchange(client, self._url, body, sample, self._count_piece)
        self.num_ended += 1
        self.num_failed += sample.error is not None

    def _count_piece(self) -> None:
        self.num_pieces += 1

    def _is_over(self) -> bool:
        return self._seconds is not None and perf_counter() - self.start_s >= self._seconds
