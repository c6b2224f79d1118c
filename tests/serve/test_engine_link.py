# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front's way to its engine: ready after a real token, honest while it is not, and back when another one comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.errors import EngineDead, StartError
from metrale_ray.protocol.keys import new_keys
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.engine_link import EngineAddress, EngineLink
from metrale_ray.serve.failures import ApiError
from tests.fixtures.succ import write_succ
from tests.test_head import Process

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("succ"))


def address_of(process: Process) -> EngineAddress:
    keys = new_keys()
    process.allow(keys.public)
    return EngineAddress(process.head.front_address, keys, process.head.public_key, 100)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Running:
    """A link whose task runs inside the `async with`."""

    def __init__(self, find: Callable[[], Awaitable[EngineAddress]], **options: Any) -> None:
        self.link = EngineLink(find, None, progress_timeout_s=60, **options)

    async def __aenter__(self) -> EngineLink:
        self._task = asyncio.ensure_future(self.link.run())
        return self.link

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def test_it_is_ready_after_a_real_token_and_answers(model: Path) -> None:
    process = Process(model, 1)

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find) as link:
            assert not link.health().is_ready
            assert link.health().ready_reason == "the engine is starting"
            with pytest.raises(ApiError, match="the engine is starting; try again later") as refused:
                link.front()
            assert (refused.value.status, refused.value.code) == (503, "engine_unavailable")
            await until(lambda: link.health().is_ready)
            assert link.figures()["phase"] == "ready"
            front = link.front()
            (request,) = front.prepare.requests([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            async for item in front.stream(request):
                last = item
            assert last.outputs[0].token_ids == [6, 7]

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_an_engine_that_ends_is_a_503_and_the_next_one_is_found(model: Path) -> None:
    first, second = Process(model, 1), Process(model, 1)
    addresses = [address_of(first), address_of(second)]

    async def scene() -> None:
        may_find = asyncio.Event()
        may_find.set()

        async def find() -> EngineAddress:
            if not may_find.is_set():
                raise StartError("the engine is not there")
            return addresses.pop(0)

        async with Running(find) as link:
            await until(lambda: link.health().is_ready)
            may_find.clear()
            await asyncio.to_thread(first.close)
            await until(lambda: link.health().ready_reason == "the engine is not there")
            with pytest.raises(ApiError, match="the engine is not there"):
                link.front()
            assert link.figures()["phase"] == "ended"
            assert link.health().is_moving  # nothing waits
            may_find.set()
            await until(lambda: link.health().is_ready)
            assert link.num_sessions == 2

    try:
        first.wait_ready()
        second.wait_ready()
        asyncio.run(scene())
    finally:
        second.close()


def test_work_that_waits_without_a_completed_command_is_no_progress(model: Path) -> None:
    process = Process(model, 1)
    now = [0.0]

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find, clock=lambda: now[0]) as link:
            await until(lambda: link.health().is_ready)
            link._told = {"has_work": True, "progress_age_s": 50.0}  # what a head with a stuck engine tells
            link._told_at_s = 0.0
            assert link.health().is_moving
            now[0] = 11.0
            health = link.health()
            assert not health.is_moving
            assert not health.is_ready
            assert health.moving_reason == health.ready_reason == ("work waits and no command has completed for 61 s")
            await until(lambda: link.health().is_moving)  # the head was asked again

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_what_more_is_known_of_a_death_is_told(model: Path) -> None:
    async def explain(seen: EngineDead) -> EngineDead:
        return EngineDead("rank 1: out of memory", rank=1)

    async def find() -> EngineAddress:
        raise StartError("never")

    seen = EngineDead("the connection was lost")
    assert asyncio.run(EngineLink(find, None, progress_timeout_s=1).explain(seen)) is seen
    told = asyncio.run(EngineLink(find, None, progress_timeout_s=1, explain=explain).explain(seen))
    assert (told.message, told.rank) == ("rank 1: out of memory", 1)


def test_an_address_where_nobody_listens_is_told_and_tried_again(model: Path) -> None:
    tries = []

    async def scene() -> None:
        async def find() -> EngineAddress:
            tries.append(1)
            return EngineAddress("tcp://127.0.0.1:1", new_keys(), new_keys().public, 1)

        async with Running(find) as link:
            await until(lambda: len(tries) == 2)
            assert "tcp://127.0.0.1:1" in link.health().ready_reason

    asyncio.run(scene())
